"""Standard errors of evaluation results. Pure arithmetic.

A perplexity is a ratio of sums over blocks of text (articles), which are resampled whole: tokens of
an article are not independent, and to resample tokens makes the error several times too small.
"""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SEED = 1234
RESAMPLES = 2_000


def ratio_standard_error(sums: Floats, weights: Floats) -> float | None:
    """Return the standard error of Σ sums / Σ weights, both arrays [blocks], by a bootstrap that
    draws blocks, the same ones at every call. None for fewer than two blocks."""
    return difference_standard_error((sums, weights), (np.zeros_like(sums), weights))


def difference_standard_error(
    first: tuple[Floats, Floats], second: tuple[Floats, Floats]
) -> float | None:
    """Return the standard error of the difference of two ratios Σ sums / Σ weights over the same
    blocks, by a bootstrap that draws blocks, the same ones for both ratios. `first` and `second`
    are each a pair of sums and weights, [blocks]. None for fewer than two blocks."""
    num_blocks = len(first[0])
    if num_blocks < 2:
        return None
    times = _times_drawn(num_blocks)
    ratios = [(times @ sums) / (times @ weights) for sums, weights in (first, second)]
    return float(np.std(ratios[0] - ratios[1], ddof=1))


@lru_cache(maxsize=2)
def _times_drawn(num_blocks: int) -> Floats:
    """Return a float64 array [RESAMPLES, blocks] of how often each resample of the bootstrap draws
    each block; the same at every call."""
    generator = np.random.default_rng(SEED)
    return generator.multinomial(num_blocks, np.full(num_blocks, 1 / num_blocks), RESAMPLES).astype(
        np.float64
    )


def mean_standard_error(values: Floats) -> float | None:
    """Return the standard error of the mean of independent values, [n]. None for fewer than two."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
