"""Bubble and activations in flight of each schedule, counted by the logical clocks of a run."""

from pathlib import Path

import pytest

from engine.config import ScheduleName
from engine.pipeline.schedule import Compute, Op, compute_orders, ideal_bubble, peaks_in_flight
from experiments.catalogue import find_experiment
from experiments.measured.bubble import BACKWARD, FORWARD, run_schedule
from experiments.runner import run_named
from experiments.verdicts import judge, load_results
from tests.ranks import run_ranks

PP, MICROBATCHES = 4, 8


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_counted_bubble_and_activations_in_flight(name: ScheduleName, chunks: int) -> None:
    """The bubble is (slowest rank's time) / (m · (t_f + t_b)) − 1, the formula's own value."""
    ideal_units = MICROBATCHES * chunks * (FORWARD + BACKWARD)
    ranks = [counted for (counted,) in run_ranks(run_schedule, PP, name, PP, chunks, [MICROBATCHES])]
    bubble = max(rank.units for rank in ranks) / ideal_units - 1
    assert bubble == pytest.approx(ideal_bubble(name, PP, chunks, MICROBATCHES))
    peaks = [rank.peak for rank in ranks]
    assert peaks == peaks_in_flight(name, PP, chunks, MICROBATCHES)
    assert peaks[0] == {"gpipe": MICROBATCHES, "1f1b": PP, "interleaved": 11}[name]
    assert all(rank.left == 0 for rank in ranks)


def one_after_the_other(name: ScheduleName, pp: int, chunks: int, microbatches: int) -> list[list[Compute]]:
    """Every microbatch goes all the way before the next one starts."""
    return [[Compute(op, m) for m in range(microbatches) for op in (Op.FORWARD, Op.BACKWARD)] for _ in range(pp)]


def outcomes(folder: Path) -> set[str]:
    return {one.outcome for one in judge([find_experiment("gpipe/bubble")], load_results([folder]))}


def test_the_claims_are_judged_by_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = find_experiment("gpipe/bubble")
    run_named([experiment], "here", tmp_path / "good")
    assert outcomes(tmp_path / "good") == {"consistent"}

    def lazy(name: ScheduleName, pp: int, chunks: int, microbatches: int) -> list[list[Compute]]:
        orders = compute_orders(name, pp, chunks, microbatches)
        return one_after_the_other(name, pp, chunks, microbatches) if pp == 2 else orders

    monkeypatch.setattr("experiments.measured.bubble.compute_orders", lazy)
    run_named([experiment], "here", tmp_path / "lazy")
    assert outcomes(tmp_path / "lazy") == {"consistent", "inconsistent"}
