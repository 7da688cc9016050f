"""The learning-rate finder: its curve on losses that are known, and on a training that diverges."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from mlm_repro.engine.launch.threads import run_threads
from mlm_repro.engine.lr_finder import RateCurve, StationaryRate, describe_curve, find_learning_rate
from mlm_repro.engine.run.resolved import resolve
from mlm_repro.lineage.errors import BadInput
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


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_quadratic_in_noise_becomes_stationary_as_is_known(momentum: float) -> None:
    """Of λw²/2 with noise σ in the gradient SGD has E[w·g] = ησ²/(2 - ηλ), and a loss of half as much."""
    curvature, noise, size, chance = 0.2, 3.0, 2000, np.random.default_rng(1)
    rate = StationaryRate(0.1, period=200)
    weights, velocity = np.full(size, 50.0), np.zeros(size)
    terms, losses, first = [], [], math.nan
    for number in range(4000):
        before, eta = weights, rate.rate
        gradient = curvature * weights + noise * chance.standard_normal(size)
        velocity = momentum * velocity - eta * gradient
        weights = weights + velocity
        rate.add(float(-(before @ velocity)), float(velocity @ velocity) / 2)
        if number == 50 and not momentum:
            assert rate.ratio > 10  # far from rest
        if eta == 0.1:
            terms.append(before @ gradient / size)
            losses.append(curvature * (before @ before) / size / 2)
        first = float(number) if rate.lowered and math.isnan(first) else first
    assert 390 < first < 3000
    assert rate.lowered[0] == 0.1
    assert rate.rate < 0.1
    assert "the weights became stationary at 0.1" in rate.describe()
    if not momentum:
        known = 0.1 * noise**2 / (2 - 0.1 * curvature)
        assert np.mean(terms[400:]) == pytest.approx(known, rel=0.1)
        assert np.mean(losses[400:]) == pytest.approx(known / 2, rel=0.1)


def test_moments_of_an_update_do_not_depend_on_the_layout(dataset: Path) -> None:
    def ratio(ranks: int, **parallel: object) -> float:
        def work(rate: StationaryRate) -> float:
            find_learning_rate(run, 1e-9, 0.01, 6, rate)
            return rate.ratio

        config = small_config(dataset)
        layout = config.parallel.model_copy(update=parallel)
        run = resolve(config.model_copy(update={"parallel": layout}), ranks)
        if ranks == 1:
            return work(StationaryRate(0.01, 100))
        return run_threads(lambda: work(StationaryRate(0.01, 100)), ranks)[0]

    serial = ratio(1)
    assert serial != 1
    for parallel in ({"tp": 2}, {"pp": 2}, {"shard_optimizer": True}):
        assert ratio(2, **parallel) == pytest.approx(serial, rel=1e-3), parallel


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
    code, out, err = mlm_train("lr-find", config, *ends, "--stationary", "--ranks", 1, "--out", tmp_path / "relation")
    assert code == 0, err
    written = json.loads((tmp_path / "relation" / "small.json").read_text(encoding="utf-8"))
    assert f"suggested learning rate {written['suggestion']:.3g}" in out
    assert set(written["rates"]) <= {0.1 * 0.1**place for place in range(12)}
