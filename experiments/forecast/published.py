"""Predicts published curves from other published points: a larger model's, or the later part of training.

Imports no torch.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from scipy.optimize import brentq  # type: ignore[import-untyped]

from experiments.catalogue import Claim, find_experiment
from experiments.files import FITTED, HELD_OUT
from experiments.forecast.law import Floats, fit_powers
from lineage.errors import BadInput

READING_ERROR = 0.03
"""Largest error in perplexity of a number that was read off a figure."""
DRAWS, TOKEN_DRAWS = 1000, 200
FITTED_SHARE = 1 / 3
"""Share of training, from its start, that the law over tokens is fitted to."""
SIZE = re.compile(r"([\d.]+)([mb])")
UNITS = {"m": 1e6, "b": 1e9}


def parameters_of(series: str) -> float:
    """The number of parameters in a model's name: `345m`, `8.3b`. Raises BadInput for another name."""
    match = SIZE.fullmatch(series)
    if not match:
        raise BadInput(f"{series!r} does not say how many parameters the model has, as 345m or 8.3b do")
    return float(match[1]) * UNITS[match[2]]


def extrapolated(claims: Sequence[Claim], over: str) -> list[dict[str, Any]]:
    """Records of published losses as predicted by a law through other published losses, with 90 % intervals.

    `over` is "sizes" or "tokens"; a loss is the logarithm of a perplexity.
    """
    return _over_sizes(claims) if over == "sizes" else _over_tokens(claims)


def _over_sizes(claims: Sequence[Claim]) -> list[dict[str, Any]]:
    """The largest model's curve from those of the three others, by loss = E + A · N^−α at each point of training.

    The interval is that of the reading error alone.
    """
    curves: dict[float, dict[str, float]] = defaultdict(dict)
    for claim in claims:
        if claim.x is not None:
            curves[claim.x][claim.series] = float(claim.value)
    largest = max({claim.series for claim in claims}, key=parameters_of)
    noise = np.random.default_rng(0)
    numbers = []
    for x, point in curves.items():
        if largest not in point:
            continue
        sizes = np.array([parameters_of(name) / parameters_of(largest) for name in point if name != largest])
        read = np.array([value for name, value in point.items() if name != largest])
        interval = _interval(partial(_at_one, sizes), read, noise)
        loss = _at_one(sizes, np.log(read))
        numbers.append(_number(claims[0].quantity, largest, x, "epochs", loss, *interval, HELD_OUT))
    return numbers


def _over_tokens(claims: Sequence[Claim]) -> list[dict[str, Any]]:
    """Every model's curve from the first third of all curves, by loss = E + A · N^−α + B · D^−β.

    D counts iterations, because every model of the figure has the same batch. The interval is that of the reading error
    and of the fit's residuals.
    """
    sizes = np.array([parameters_of(claim.series) for claim in claims])
    places = np.array([claim.x or 0.0 for claim in claims])
    read = np.array([float(claim.value) for claim in claims])
    sizes, tokens = sizes / sizes.max(), places / places.max()
    fitted = tokens <= FITTED_SHARE

    def terms(exponents: Floats) -> Floats:
        return np.stack([np.ones_like(sizes), sizes ** -exponents[0], tokens ** -exponents[1]], axis=1)

    def fit(read: Floats, start: Sequence[float]) -> tuple[Floats, Floats, Floats]:
        """Exponents, losses at all points, residuals at the fitted ones."""
        early = np.log(read[fitted])
        exponents, factors, residuals = fit_powers(lambda e: terms(e)[fitted], early, [start], ((0.01, 3.0),) * 2)
        return exponents, terms(exponents) @ factors, residuals

    exponents, losses, _ = fit(read, (0.3, 0.4))
    noise = np.random.default_rng(0)
    drawn = []
    for _ in range(TOKEN_DRAWS):
        reading = read + noise.uniform(-READING_ERROR, READING_ERROR, len(read))
        _, again, residuals = fit(reading, exponents.tolist())
        drawn.append(again + noise.choice(-residuals, len(read)))
    lows, highs = np.quantile(drawn, (0.05, 0.95), axis=0)
    return [
        _number(claim.quantity, claim.series, x, "iterations", loss, low, high, FITTED if is_fitted else HELD_OUT)
        for claim, x, loss, low, high, is_fitted in zip(claims, places, losses, lows, highs, fitted, strict=True)
    ]


def _number(
    quantity: str, series: str, x: float, x_name: str, loss: float, low: float, high: float, note: str
) -> dict[str, Any]:
    """A line of a record: a loss and its interval as perplexities."""
    value, low, high = (float(np.exp(end)) for end in (loss, low, high))
    place = {"series": series, "quantity": quantity, "x": float(x), "x_name": x_name}
    return place | {"kind": "simulated", "value": value, "low": low, "high": high, "note": note}


def published_exponent(claims: Sequence[Claim], series: Sequence[str]) -> tuple[float, float, float]:
    """α of loss = E + A · N^−α through three models' last published points, with its 90 % interval."""
    last = [max((claim for claim in claims if claim.series == name and claim.x), key=lambda c: c.x or 0.0)
            for name in series]  # fmt: skip
    sizes = np.array([parameters_of(name) for name in series])
    read = np.array([float(claim.value) for claim in last])
    exponent = partial(_exponent, sizes / sizes[-1])
    return exponent(np.log(read)), *_interval(exponent, read, np.random.default_rng(0))


def _interval(quantity: Callable[[Floats], float], read: Floats, noise: np.random.Generator) -> tuple[float, float]:
    """The 90 % interval of a function of the losses, due to the reading error of the perplexities."""
    drawn = read + noise.uniform(-READING_ERROR, READING_ERROR, (DRAWS, len(read)))
    low, high = np.quantile([quantity(np.log(each)) for each in drawn], (0.05, 0.95))
    return float(low), float(high)


def beside_published(exponent: float, low: float, high: float) -> str:
    """A sentence that compares a ladder's exponent and its interval with those of the published curve."""
    names = ("345m", "775m", "2.5b")
    value, least, most = published_exponent(find_experiment("2019/scaling-law").claims, names)
    overlap = "overlap" if low <= most and least <= high else "do not overlap"
    return (
        f"Losses at the end fall towards a limit with N^-{exponent:.3f} ({low:.3f} to {high:.3f}); the published "
        f"curves of 345M, 775M and 2.5B do at their last epoch with N^-{value:.3f} ({least:.3f} to {most:.3f}), by "
        f"the same form: the intervals {overlap}; limits and factors cannot be compared, as text, vocabulary and "
        "tokens differ"
    )


def _gains(sizes: Floats, exponent: float) -> Floats:
    """Gain of each size over size 1, up to a factor; smooth in the exponent, also at 0."""
    return np.log(sizes) if exponent == 0 else -np.expm1(-exponent * np.log(sizes)) / exponent


def _exponent(sizes: Floats, losses: Floats) -> float:
    """Exponent of the law through three sizes' falling losses."""

    def mismatch(exponent: float) -> float:
        first, second, third = _gains(sizes, exponent)
        return float((losses[0] - losses[1]) * (third - second) - (losses[1] - losses[2]) * (second - first))

    return float(brentq(mismatch, -10.0, 10.0))


def _at_one(sizes: Floats, losses: Floats) -> float:
    """The loss at size 1 by the law through three sizes' losses."""
    first, second, _ = _gains(sizes, _exponent(sizes, losses))
    return float(losses[0] + (losses[0] - losses[1]) / (second - first) * first)
