"""The largest model's published curve, predicted from the published curves of the smaller ones. Imports no torch."""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import brentq  # type: ignore[import-untyped]

from experiments.catalogue import Claim
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
        drawn = read + noise.uniform(-READING_ERROR, READING_ERROR, (DRAWS, len(read)))
        low, high = np.quantile([_at_one(sizes, np.log(each)) for each in drawn], (0.05, 0.95))
        numbers.append({
            "series": series, "x": x, "x_name": "epochs", "quantity": claims[0].quantity, "kind": "simulated",
            "value": float(np.exp(_at_one(sizes, np.log(read)))), "low": float(np.exp(low)),
            "high": float(np.exp(high)), "note": HELD_OUT,
        })  # fmt: skip
    return numbers


def _at_one(sizes: np.ndarray, losses: np.ndarray) -> float:
    """The loss at size 1 of the law through three sizes' losses, each lower than the one before."""

    def gains(exponent: float) -> np.ndarray:
        """Of each size over size 1, but for a factor; smooth in the exponent, also at 0."""
        return np.log(sizes) if exponent == 0 else -np.expm1(-exponent * np.log(sizes)) / exponent

    def mismatch(exponent: float) -> float:
        first, second, third = gains(exponent)
        return float((losses[0] - losses[1]) * (third - second) - (losses[1] - losses[2]) * (second - first))

    first, second, _ = gains(brentq(mismatch, *EXPONENTS))
    return float(losses[0] + (losses[0] - losses[1]) / (second - first) * first)
