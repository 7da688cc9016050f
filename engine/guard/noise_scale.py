"""The gradient noise scale from gradients of a small and a large batch (McCandlish et al. 2018, Appendix A.1).

Imports no torch.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from engine.guard import Guard, Iteration
from lineage.files import Step

WINDOW = 100
"""Iterations over which a run's noise scale is averaged."""


@dataclass(frozen=True)
class GradientMoments:
    """Estimates without bias of |G|², the squared norm of the true gradient, and tr Σ, the variance of one sample's."""

    square: float
    variance: float


def gradient_moments(small_square: float, small_batch: int, large_square: float, large_batch: int) -> GradientMoments:
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
    estimates = list(moments)
    square, variance = sum(moment.square for moment in estimates), sum(moment.variance for moment in estimates)
    return variance / square if square > 0 and variance > 0 else None


class NoiseScaleGuard(Guard):
    """Adds to its metrics a run's noise scale over its last WINDOW iterations, from norms that training has anyway."""

    def __init__(self, steps: Iterable[Step], dp: int) -> None:
        """Goes on from the iterations that the run on `dp` data-parallel ranks has written so far."""
        self._dp = dp
        known = (
            GradientMoments(step.gradient_square, step.gradient_variance)
            for step in steps
            if step.gradient_square is not None and step.gradient_variance is not None
        )
        self._last = deque(known, maxlen=WINDOW)

    def after(self, iteration: Iteration) -> str:
        """Add what the iteration tells."""
        gradient, line = iteration.gradient, iteration.line
        moments, line.noise_scale = self.measure(gradient.local_square, gradient.norm, iteration.batch_size)
        line.gradient_square = moments.square if moments else None
        line.gradient_variance = moments.variance if moments else None
        return ""

    def measure(
        self, local_square: float, gradient_norm: float, batch_size: int
    ) -> tuple[GradientMoments | None, float | None]:
        """What an iteration adds to its metrics line: the moments as it estimates them, and the noise scale.

        `local_square` is the mean, over the data-parallel ranks, of the squared norm of a rank's gradient; the ranks
        share `batch_size` samples. Both are None after an iteration whose gradient is not finite.
        """
        if not math.isfinite(local_square) or not math.isfinite(gradient_norm):
            return None, None
        moments = gradient_moments(local_square, batch_size // self._dp, gradient_norm**2, batch_size)
        self._last.append(moments)
        return moments, noise_scale(self._last)
