"""The largest model's published curve, predicted from the published curves of the smaller ones. Imports no torch."""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from scipy.optimize import brentq  # type: ignore[import-untyped]

from experiments.catalogue import Claim, find_experiment
from experiments.verdicts import HELD_OUT
from lineage.errors import BadInput

READING_ERROR = 0.03
"""In perplexity, of a number that was read off a figure; the true one lies anywhere within it."""
DRAWS = 1000
EXPONENTS = (-10.0, 10.0)
"""Between which a law's exponent is looked for."""
SIZE = re.compile(r"([\d.]+)([mb])")
UNITS = {"m": 1e6, "b": 1e9}


def parameters_of(series: str) -> float:
    """The number of parameters that a model's name gives: `345m`, `8.3b`. Raises BadInput for another name."""
    match = SIZE.fullmatch(series)
    if not match:
        raise BadInput(f"{series!r} does not say how many parameters the model has, as 345m or 8.3b do")
    return float(match[1]) * UNITS[match[2]]


def extrapolated(claims: Sequence[Claim], series: str) -> list[dict[str, Any]]:
    """At each place of the series' curve the perplexity that the law gives it, with a 90 % interval.

    The law is loss = E + A · N^−α, a loss for each place, through the three other models, where N is the number of
    parameters and loss the logarithm of perplexity. The interval is that of the points' reading alone.
    """
    curves: dict[float, dict[str, float]] = defaultdict(dict)
    for claim in claims:
        if claim.x is not None:
            curves[claim.x][claim.series] = float(claim.value)
    noise = np.random.default_rng(0)
    numbers = []
    for x, point in curves.items():
        if series not in point:
            continue
        sizes = np.array([parameters_of(name) / parameters_of(series) for name in point if name != series])
        read = np.array([value for name, value in point.items() if name != series])
        low, high = _interval(partial(_at_one, sizes), read, noise)
        numbers.append({
            "series": series, "x": x, "x_name": "epochs", "quantity": claims[0].quantity, "kind": "simulated",
            "value": float(np.exp(_at_one(sizes, np.log(read)))), "low": float(np.exp(low)),
            "high": float(np.exp(high)), "note": HELD_OUT,
        })  # fmt: skip
    return numbers


def published_exponent(claims: Sequence[Claim], series: Sequence[str]) -> tuple[float, float, float]:
    """α of loss = E + A · N^−α through three models' last published points, with the 90 % interval of their reading."""
    last = [max((claim for claim in claims if claim.series == name and claim.x), key=_place) for name in series]
    sizes = np.array([parameters_of(name) for name in series])
    read = np.array([float(claim.value) for claim in last])
    of = partial(_exponent, sizes / sizes[-1])
    return of(np.log(read)), *_interval(of, read, np.random.default_rng(0))


def _interval(of: Callable[[np.ndarray], float], read: np.ndarray, noise: np.random.Generator) -> tuple[float, float]:
    """Nine tenths of what a number of the losses is, by how exactly perplexities can be read."""
    drawn = read + noise.uniform(-READING_ERROR, READING_ERROR, (DRAWS, len(read)))
    low, high = np.quantile([of(np.log(each)) for each in drawn], (0.05, 0.95))
    return float(low), float(high)


def beside_published(exponent: float, low: float, high: float) -> str:
    """What a ladder's exponent by loss = E + A · N^−α, with its interval, says beside that of the published curve."""
    names = ("345m", "775m", "2.5b")
    value, least, most = published_exponent(find_experiment("2019/scaling-law").claims, names)
    overlap = "overlap" if low <= most and least <= high else "do not overlap"
    return (
        f"Losses at the end fall towards a limit with N^-{exponent:.3f} ({low:.3f} to {high:.3f}); the published "
        f"curves of 345M, 775M and 2.5B do at their last epoch with N^-{value:.3f} ({least:.3f} to {most:.3f}), by "
        f"the same form: the intervals {overlap}; limits and factors cannot be compared, as text, vocabulary and "
        "tokens differ"
    )


def _place(claim: Claim) -> float:
    return claim.x or 0.0


def _gains(sizes: np.ndarray, exponent: float) -> np.ndarray:
    """Of each size over size 1, but for a factor; smooth in the exponent, also at 0."""
    return np.log(sizes) if exponent == 0 else -np.expm1(-exponent * np.log(sizes)) / exponent


def _exponent(sizes: np.ndarray, losses: np.ndarray) -> float:
    """That of the law through three sizes' losses, each lower than the one before."""

    def mismatch(exponent: float) -> float:
        first, second, third = _gains(sizes, exponent)
        return float((losses[0] - losses[1]) * (third - second) - (losses[1] - losses[2]) * (second - first))

    return float(brentq(mismatch, *EXPONENTS))


def _at_one(sizes: np.ndarray, losses: np.ndarray) -> float:
    """The loss at size 1 of the law through three sizes' losses."""
    first, second, _ = _gains(sizes, _exponent(sizes, losses))
    return float(losses[0] + (losses[0] - losses[1]) / (second - first) * first)
