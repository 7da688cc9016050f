"""Global batch size against iteration (Megatron-LM, `num_microbatches_calculator.py`). Imports no
torch."""

from bisect import bisect_right
from typing import NamedTuple, Protocol


class TrainedBefore(Protocol):
    """The work before a seam."""

    @property
    def iteration(self) -> int: ...
    @property
    def samples(self) -> int: ...


class Recipe(Protocol):
    """The part of `TrainConfig` that says how large a batch is, and what was trained before."""

    @property
    def global_batch_size(self) -> int: ...
    @property
    def rampup_batch_size(self) -> tuple[int, int, int] | None: ...
    @property
    def continues(self) -> TrainedBefore | None: ...


class _Phase(NamedTuple):
    """Iterations of one batch size, up to the next phase."""

    iteration: int
    """First iteration of the phase, from 0."""
    sample: int
    """Samples before the phase."""
    batch_size: int


class BatchSchedule:
    """Samples of each iteration, and samples before it.

    With `train.rampup_batch_size` = (start, increment, samples) the batch grows from start by
    increment, each time that an equal part of the samples has been taken; after all samples it is
    `train.global_batch_size`. A run that continues another counts from the iterations and samples
    of that run.
    """

    def __init__(self, train: Recipe) -> None:
        seam = train.continues
        before = (seam.iteration, seam.samples) if seam else (0, 0)
        self._phases = [_Phase(*before, train.global_batch_size)]
        if train.rampup_batch_size:
            start, increment, samples = train.rampup_batch_size
            self._phases = _ramp(
                start, increment, samples, (train.global_batch_size - start) // increment, *before
            )

    def batch_size(self, iteration: int) -> int:
        """Samples of `iteration` (from 0)."""
        return self._phase(iteration).batch_size

    def samples_before(self, iteration: int) -> int:
        """Samples of all iterations before this one."""
        phase = self._phase(iteration)
        return phase.sample + (iteration - phase.iteration) * phase.batch_size

    def whole_iterations(self, samples: float) -> int:
        """Number of iterations that so many samples are enough for; a last batch that is not whole
        is left out."""
        return bisect_right(range(int(samples) + 1), samples, key=self.samples_before) - 1

    def _phase(self, iteration: int) -> _Phase:
        return self._phases[
            max(bisect_right(self._phases, iteration, key=lambda phase: phase.iteration) - 1, 0)
        ]


def _ramp(
    start: int, increment: int, samples: int, steps: int, iteration: int, taken: int
) -> list[_Phase]:
    """The phases after `iteration` iterations and `taken` samples; a short ramp leaves some out."""
    phases = []
    for step in range(steps):
        if samples * (step + 1) > taken * steps:  # the next step is not reached yet
            batch_size = start + step * increment
            phases.append(_Phase(iteration, taken, batch_size))
            # In whole numbers: Megatron-LM's ramp divides in floating point, and a step could come
            # one iteration late.
            left = samples * (step + 1) - taken * steps
            count = -(-left // (batch_size * steps))
            iteration = iteration + count
            taken = taken + count * batch_size
    return [*phases, _Phase(iteration, taken, start + steps * increment)]
