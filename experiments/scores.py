"""Bits per byte and paired differences, from evaluations. Imports no torch."""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit  # type: ignore[import-untyped]

from evaluation.schema import PerplexityResult
from evaluation.uncertainty import difference_standard_error
from experiments.files import Comparison, TextScore

NORMAL = 1.645
"""Standard errors on either side of nine tenths of a normal distribution."""


def text_score(result: PerplexityResult) -> TextScore:
    """Bits per byte, with what their errors come from: six digits of the loss of each article, and its words."""
    scored = [block for block in result.blocks if block.num_scored]
    return TextScore(
        bits_per_byte=result.bits_per_byte,
        nll=[float(f"{block.nll:.6g}") for block in scored],
        words=[block.num_original_tokens * block.num_scored / block.num_targets for block in scored],
    )


def compared(text: str, smaller: int, larger: int, scores: Sequence[Sequence[TextScore]]) -> Comparison:
    """Two of some models, of each of which `scores` has one for each seed, with a 90 % interval.

    The interval is over articles, resampled in pairs. With several seeds the standard error of the mean of their
    differences is added in squares, and Student's t has the degrees of freedom of Welch and Satterthwaite.
    """
    pair = scores[larger], scores[smaller]
    words = np.array(pair[0][0].words)
    bits = pair[0][0].bits_per_byte / (np.array(pair[0][0].nll).sum() / words.sum())
    sums = [np.mean([score.nll for score in seeds], axis=0) for seeds in pair]
    error, times = difference_standard_error((sums[0], words), (sums[1], words)) or 0.0, NORMAL
    differences = [larger.bits_per_byte - smaller.bits_per_byte for larger, smaller in zip(*pair, strict=True)]
    if (more := len(differences) - 1) and (of_seeds := np.std(differences, ddof=1) / math.sqrt(more + 1) / bits):
        error = math.hypot(error, of_seeds)
        times = float(stdtrit(more * (error / of_seeds) ** 4, 0.95))
    difference, reach = float(np.mean(differences)), times * error * bits
    return Comparison(
        text=text, smaller=smaller, larger=larger, difference=difference, low=difference - reach,
        high=difference + reach,
    )  # fmt: skip
