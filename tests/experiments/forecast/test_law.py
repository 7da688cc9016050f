"""A law through planted losses is found again, and the interval of its forecast holds what was
planted."""

import numpy as np
import pytest

from mlm_repro.experiments.files import Law, RungPlan
from mlm_repro.experiments.forecast import law
from mlm_repro.experiments.forecast.law import FROM_SHARE, FittedLaw
from mlm_repro.lineage.errors import BadInput

SIZES = (27_000, 49_000, 98_000, 154_000, 279_000, 518_000)
PLACES = [50_000 * step for step in range(1, 21)]
PLANTED = Law(
    irreducible=2.0,
    by_size=0.3,
    parameters=1e5,
    size_exponent=0.4,
    by_data=0.2,
    interaction=0.25,
    tokens=1e6,
    data_exponent=0.5,
)


def rungs() -> list[RungPlan]:
    return [RungPlan(layers=1, width=8, heads=1, parameters=n, inner_parameters=n) for n in SIZES]


def losses(size: int, rng: np.random.Generator, spread: float) -> dict[int, float]:
    """A training's curve: the planted law, off by a share that is the same all along."""
    off = 1 + spread * rng.standard_normal()
    return {place: off * PLANTED.loss(size, place) for place in PLACES}


def curves(
    rng: np.random.Generator, spread: float, count: int = 5
) -> dict[int, list[dict[int, float]]]:
    return {rung: [losses(SIZES[rung], rng, spread) for _ in range(3)] for rung in range(count)}


def test_a_law_without_noise_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(law, "DRAWS", 20)
    fitted = FittedLaw(rungs(), curves(np.random.default_rng(0), 0.0))
    curve = fitted.forecast(SIZES[-1])
    assert [place.tokens for place in curve] == [
        place for place in PLACES if place >= FROM_SHARE * PLACES[-1]
    ]
    for place in curve:
        assert place.loss == pytest.approx(PLANTED.loss(SIZES[-1], place.tokens), rel=1e-4)
    assert fitted.law.size_exponent == pytest.approx(PLANTED.size_exponent, rel=0.02)
    assert np.abs(fitted.misfits).max() < 1e-4
    noisy = FittedLaw(rungs(), curves(np.random.default_rng(3), 0.004, 3))
    assert noisy.forecast(SIZES[3]) == noisy.forecast(SIZES[3])


def test_intervals_hold_about_nine_in_ten_planted_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(law, "DRAWS", 60)
    hits, plantings = 0, 12
    for seed in range(plantings):
        rng = np.random.default_rng(seed)
        end = FittedLaw(rungs(), curves(rng, 0.004)).forecast(SIZES[-1])[-1]
        hits += end.low <= losses(SIZES[-1], rng, 0.004)[end.tokens] <= end.high
        assert end.high - end.low < 0.1 * end.loss
    assert hits >= 7  # of nine in ten, fewer come up once in ten thousand times


def test_two_rungs_make_no_law() -> None:
    with pytest.raises(BadInput, match="a law needs 3 rungs below the largest; 2 came to an end"):
        FittedLaw(rungs(), curves(np.random.default_rng(0), 0.0, 2))
