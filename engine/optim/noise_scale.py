"""The gradient noise scale from gradients of a small and a large batch (McCandlish et al. 2018, Appendix A.1).

Imports no torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class GradientMoments:
    """Estimates without bias of |G|², the squared norm of the true gradient, and tr Σ, the variance of one sample's."""

    square: float
    variance: float


def gradient_moments(
    small_square: float, small_batch: int, large_square: float, large_batch: int
) -> GradientMoments:  # fmt: skip
    """From squared norms of a gradient averaged over each batch: E|G_B|² = |G|² + tr Σ / B.

    In data-parallel training the small batch is a rank's, the large one the whole. Raises ValueError unless the
    batches differ.
    """
    if not 0 < small_batch < large_batch:
        raise ValueError(f"batches of {small_batch} and {large_batch} do not tell noise from gradient")
    square = (large_batch * large_square - small_batch * small_square) / (large_batch - small_batch)
    variance = (small_square - large_square) / (1 / small_batch - 1 / large_batch)
    return GradientMoments(square, variance)


def noise_scale(moments: Iterable[GradientMoments]) -> float | None:
    """B_simple = tr Σ / |G|², in samples, of both means over iterations; None where the gradient drowns in the noise.

    The two are averaged apart, since a ratio of single estimates is biased.
    """
    found = list(moments)
    square, variance = sum(one.square for one in found), sum(one.variance for one in found)
    return variance / square if square > 0 and variance > 0 else None
