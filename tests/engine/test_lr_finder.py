"""The learning-rate finder: its curve on losses that are known, and on a training that diverges."""

import json
import math
from pathlib import Path

import pytest

from engine.launch.threads import run_threads
from engine.lr_finder import RateCurve, describe_curve, find_learning_rate
from engine.run.resolved import resolve
from lineage.errors import BadInput
from tests.engine.small_run import mlm_train, resolved, small_config, write_toml


def curve_of(losses: list[float], low: float = 1e-4, high: float = 1.0) -> RateCurve:
    curve = RateCurve()
    for place, loss in enumerate(losses):
        if curve.add(low * (high / low) ** (place / (len(losses) - 1)), loss):
            break
    return curve


def test_a_valley_is_found_and_a_tenth_of_it_suggested() -> None:
    rates = [10 ** (-4 + 4 * place / 400) for place in range(401)]
    curve = curve_of([5 + (math.log10(rate) + 2) ** 2 / 4 for rate in rates])
    assert curve.lowest_rate == pytest.approx(1e-2, rel=0.3)  # the average lags a little
    assert curve.suggestion == pytest.approx(curve.lowest_rate / 10)
    assert "suggested learning rate 0.001" in describe_curve(curve, 1.0)


@pytest.mark.parametrize(("bad", "kept"), [(math.nan, 3), (math.inf, 3), (1e3, 4)])
def test_a_diverging_loss_ends_the_sweep(bad: float, kept: int) -> None:
    curve = curve_of([4.0, 3.5, 3.0, bad, 3.0, 3.0])
    assert len(curve.rates) == kept
    assert "the sweep ended at" in describe_curve(curve, 1.0)


def test_a_loss_that_never_falls_suggests_nothing() -> None:
    curve = curve_of([3.0, 3.1, 3.2])
    assert (curve.lowest_rate, curve.suggestion) == (None, None)
    assert "begin lower" in describe_curve(curve, 1.0)


def test_a_training_is_swept_until_it_diverges(dataset: Path) -> None:
    curve = find_learning_rate(resolved(small_config(dataset, clip_gradient=0.0)), 1e-5, 1e4, 40)
    assert 5 < len(curve.rates) < 40  # untrained, learning, lost
    assert curve.losses[0] == pytest.approx(math.log(290), abs=0.1)
    assert min(curve.smoothed) < curve.losses[0] - 0.2
    assert curve.lowest_rate is not None
    assert 1e-4 < curve.lowest_rate < 1
    for divided in run_threads(
        find_learning_rate, 2, resolve(small_config(dataset, clip_gradient=0.0), 2), 1e-5, 1e4, 40
    ):
        assert divided.losses[:10] == pytest.approx(curve.losses[:10], rel=1e-4)


@pytest.mark.parametrize(("low", "high", "iterations"), [(0.0, 1.0, 9), (1.0, 1.0, 9), (0.1, math.inf, 9), (0.1, 1, 1)])
def test_what_is_no_sweep_is_refused(low: float, high: float, iterations: int, dataset: Path) -> None:
    with pytest.raises(BadInput, match="no sweep"):
        find_learning_rate(resolved(small_config(dataset)), low, high, iterations)


def test_the_command_writes_the_curve(dataset: Path, tmp_path: Path) -> None:
    config = write_toml(tmp_path / "small.toml", dataset)
    ends = ("--low", "1e-4", "--high", "0.1", "--iterations", 12)
    code, out, err = mlm_train("lr-find", config, *ends, "--ranks", 1, "--out", tmp_path / "found")
    assert code == 0, err
    written = json.loads((tmp_path / "found" / "small.json").read_text(encoding="utf-8"))
    assert written["rates"] == pytest.approx([1e-4 * 10 ** (3 * place / 11) for place in range(len(written["rates"]))])
    assert f"suggested learning rate {written['suggestion']:.3g}" in out
    assert written["ranks"] == 1
    assert not list(tmp_path.glob("runs*"))
