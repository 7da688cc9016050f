"""Loss spikes: iterations that leap out of those just before them. Imports no torch.

A loss or a gradient norm that is above the mean of the last 128 by more than 6 standard deviations is a spike, as soon
as 64 are known (OLMo-core, `optim/skip_step_optimizer.py`, which counts leaps downwards as well). Spikes are among the
128 that later ones are held against, so that a level that stays is soon none.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence

from engine.guard import Guard, Iteration
from lineage.files import Step

WINDOW, LEAST = 128, 64
"""Iterations that are remembered, and how many there must be before anything is called a spike."""
DEVIATIONS = 6.0


class RecentIterations:
    """Losses and gradient norms of the last iterations; checkpoints keep them, so that a resumed run decides alike."""

    def __init__(self, seen: Iterable[Sequence[float]] = ()) -> None:
        self._seen = deque(((loss, norm) for loss, norm in seen), maxlen=WINDOW)

    def state(self) -> tuple[tuple[float, float], ...]:
        """What a checkpoint keeps: (loss, gradient norm), oldest first."""
        return tuple(self._seen)

    def add(self, loss: float, gradient_norm: float) -> dict[str, float]:
        """What of this iteration leaps, with its limit: `loss`, `gradient_norm`; empty for most iterations.

        An iteration with anything that is not finite (an fp16 overflow) is none and is not remembered.
        """
        values = {"loss": loss, "gradient_norm": gradient_norm}
        if not all(math.isfinite(value) for value in values.values()):
            return {}
        limits = dict(zip(values, map(_limit, zip(*self._seen, strict=True)), strict=True)) if self._is_ready else {}
        self._seen.append((loss, gradient_norm))
        return {name: limit for name, limit in limits.items() if values[name] > limit}

    @property
    def _is_ready(self) -> bool:
        return len(self._seen) >= LEAST


class SpikeGuard(Guard):
    """Notes an iteration that leaps in the metrics, and leaves its update out if `skip`."""

    def __init__(self, recent: RecentIterations, skip: bool) -> None:
        self._recent, self._skip = recent, skip
        self._spike: dict[str, float] = {}

    def skips(self, iteration: Iteration) -> bool:
        """Whether it is a spike and spikes are skipped."""
        self._spike = self._recent.add(iteration.gradient.loss, iteration.gradient.norm)
        return self._skip and bool(self._spike)

    def after(self, iteration: Iteration) -> str:
        """Add the spike, with its limits, to the metrics."""
        iteration.line.spike = self._spike
        return describe_spike(iteration.line)


def describe_spike(step: Step) -> str:
    """What an iteration with a spike says to the user; nothing where there is none."""
    if not step.spike:
        return ""
    leaps = " and ".join(
        f"{name.replace('_', ' ')} {getattr(step, name):.4g} above {limit:.4g}" for name, limit in step.spike.items()
    )
    done = "no update was made" if step.skipped else "the update was made"
    return f"warning: iteration {step.iteration} is a spike, {leaps}; {done}"


def _limit(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean + DEVIATIONS * math.sqrt(variance)
