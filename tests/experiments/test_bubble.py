"""Bubble and activations in flight of each schedule, counted by the logical clocks of a run."""

import pytest

from mlm_repro.engine.config import ScheduleName
from mlm_repro.engine.pipeline.schedule import ideal_bubble, peaks_in_flight
from mlm_repro.experiments.measured.bubble import BACKWARD, FORWARD, run_schedule
from tests.ranks import run_ranks

PP, MICROBATCHES = 4, 8


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_counted_bubble_and_activations_in_flight(name: ScheduleName, chunks: int) -> None:
    """The bubble is (slowest rank's time) / (m · (t_f + t_b)) − 1, the formula's own value."""
    ideal_units = MICROBATCHES * chunks * (FORWARD + BACKWARD)
    ranks = [
        counted for (counted,) in run_ranks(run_schedule, PP, name, PP, chunks, [MICROBATCHES])
    ]
    bubble = max(rank.units for rank in ranks) / ideal_units - 1
    assert bubble == pytest.approx(ideal_bubble(name, PP, chunks, MICROBATCHES))
    peaks = [rank.peak for rank in ranks]
    assert peaks == peaks_in_flight(name, PP, chunks, MICROBATCHES)
    assert peaks[0] == {"gpipe": MICROBATCHES, "1f1b": PP, "interleaved": 11}[name]
    assert all(rank.in_flight == 0 for rank in ranks)
