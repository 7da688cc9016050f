"""Standard errors of evaluation results. Pure arithmetic.

Perplexities are ratios of sums over blocks of text (articles), which are resampled whole: tokens of one article
are not independent, and taking them so makes the error several times too small.
"""

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SEED = 1234
RESAMPLES = 2_000


def ratio_standard_error(sums: Floats, weights: Floats) -> float | None:
    """Block bootstrap of Σ sums / Σ weights, each [blocks]. None for fewer than two blocks."""
    return difference_standard_error((sums, weights), (np.zeros_like(sums), weights))


def difference_standard_error(first: tuple[Floats, Floats], second: tuple[Floats, Floats]) -> float | None:
    """The same of the difference of two such ratios over the same blocks, which are resampled in pairs."""
    num_blocks = len(first[0])
    if num_blocks < 2:
        return None
    generator = np.random.default_rng(SEED)
    times = generator.multinomial(num_blocks, np.full(num_blocks, 1 / num_blocks), RESAMPLES).astype(np.float64)
    ratios = [(times @ sums) / (times @ weights) for sums, weights in (first, second)]
    return float(np.std(ratios[0] - ratios[1], ddof=1))


def mean_standard_error(values: Floats) -> float | None:
    """Of the mean of independent values. None for fewer than two."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
