"""Predicts published curves from other published points: a larger model's, or the later part of
training.

Imports no torch.
"""

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from scipy.optimize import brentq  # type: ignore[import-untyped]

from mlm_repro.experiments.catalogue import Claim
from mlm_repro.experiments.files import FITTED, HELD_OUT
from mlm_repro.experiments.forecast.law import Floats, fit_powers
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.errors import BadInput

READING_ERROR = 0.03
"""Largest error in perplexity of a number that was read off a figure."""
DRAWS, TOKEN_DRAWS = 1000, 200
FITTED_SHARE = 1 / 3
"""Share of training, from its start, that the law over tokens is fitted to."""
SIZE = re.compile(r"([\d.]+)([mb])")
UNITS = {"m": 1e6, "b": 1e9}


def parameters_of(series: str) -> float:
    """The number of parameters in a model's name: `345m`, `8.3b`. Raises BadInput for another
    name."""
    match = SIZE.fullmatch(series)
    if not match:
        raise BadInput(
            f"{series!r} does not say how many parameters the model has, as 345m or 8.3b do"
        )
    return float(match[1]) * UNITS[match[2]]


def extrapolated(claims: Sequence[Claim], over: str) -> list[tuple[JSON, float]]:
    """Records of published losses as predicted by a law through other published losses, with 90 %
    intervals, each with the value that stays if nothing is gained beyond what the law was fitted
    to.

    `over` is "sizes" or "tokens"; a loss is the logarithm of a perplexity.
    """
    return _over_sizes(claims) if over == "sizes" else _over_tokens(claims)


def _over_sizes(claims: Sequence[Claim]) -> list[tuple[JSON, float]]:
    """The largest model's curve from those of the three others, by loss = E + A · N^−α at each
    point of training.

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
        sizes = np.array(
            [parameters_of(name) / parameters_of(largest) for name in point if name != largest]
        )
        read = np.array([value for name, value in point.items() if name != largest])
        drawn = read + noise.uniform(-READING_ERROR, READING_ERROR, (DRAWS, len(read)))
        low, high = np.quantile([_at_one(sizes, np.log(each)) for each in drawn], (0.05, 0.95))
        loss = _at_one(sizes, np.log(read))
        number = _number(claims[0].quantity, largest, x, "epochs", loss, low, high, HELD_OUT)
        numbers.append((number, float(read.min())))
    return numbers


def _over_tokens(claims: Sequence[Claim]) -> list[tuple[JSON, float]]:
    """Every model's curve from the first third of all curves, by loss = E + A · N^−α + B · D^−β.

    D counts iterations, because every model of the figure has the same batch. The interval is that
    of the reading error and of the fit's residuals.
    """
    sizes = np.array([parameters_of(claim.series) for claim in claims])
    places = np.array([claim.x or 0.0 for claim in claims])
    read = np.array([float(claim.value) for claim in claims])
    sizes, tokens = sizes / sizes.max(), places / places.max()
    fitted = tokens <= FITTED_SHARE

    def terms(exponents: Floats) -> Floats:
        return np.stack(
            [np.ones_like(sizes), sizes ** -exponents[0], tokens ** -exponents[1]], axis=1
        )

    def fit(read: Floats, start: Sequence[float]) -> tuple[Floats, Floats, Floats]:
        """Exponents, losses at all points, residuals at the fitted ones."""
        early = np.log(read[fitted])
        exponents, factors, residuals = fit_powers(
            lambda e: terms(e)[fitted], early, [start], ((0.01, 3.0),) * 2
        )
        return exponents, terms(exponents) @ factors, residuals

    exponents, losses, _ = fit(read, (0.3, 0.4))
    noise = np.random.default_rng(0)
    drawn = []
    for _ in range(TOKEN_DRAWS):
        reading = read + noise.uniform(-READING_ERROR, READING_ERROR, len(read))
        _, again, residuals = fit(reading, exponents.tolist())
        drawn.append(again + noise.choice(-residuals, len(read)))
    lows, highs = np.quantile(drawn, (0.05, 0.95), axis=0)
    last = {
        claim.series: float(claim.value)
        for claim, is_fitted in zip(claims, fitted, strict=True)
        if is_fitted
    }
    return [
        (
            _number(
                claim.quantity,
                claim.series,
                x,
                "iterations",
                loss,
                low,
                high,
                FITTED if is_fitted else HELD_OUT,
            ),
            last[claim.series],
        )
        for claim, x, loss, low, high, is_fitted in zip(
            claims, places, losses, lows, highs, fitted, strict=True
        )
    ]


def _number(
    quantity: str,
    series: str,
    x: float,
    x_name: str,
    loss: float,
    low: float,
    high: float,
    note: str,
) -> JSON:
    value, low, high = (float(np.exp(end)) for end in (loss, low, high))
    place = {"series": series, "quantity": quantity, "x": float(x), "x_name": x_name}
    return place | {"kind": "simulated", "value": value, "low": low, "high": high, "note": note}


def _gains(sizes: Floats, exponent: float) -> Floats:
    """Gain of each size over size 1, up to a factor; smooth in the exponent, also at 0."""
    return np.log(sizes) if exponent == 0 else -np.expm1(-exponent * np.log(sizes)) / exponent


def _at_one(sizes: Floats, losses: Floats) -> float:
    """The loss at size 1 by the law through three sizes' falling losses."""

    def mismatch(exponent: float) -> float:
        first, second, third = _gains(sizes, exponent)
        return float(
            (losses[0] - losses[1]) * (third - second) - (losses[1] - losses[2]) * (second - first)
        )

    first, second, _ = _gains(sizes, float(brentq(mismatch, -10.0, 10.0)))
    return float(losses[0] + (losses[0] - losses[1]) / (second - first) * first)
