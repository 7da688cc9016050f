"""Global batch size as a function of the iteration (Megatron-LM, `num_microbatches_calculator.py`).
Imports no torch."""

from bisect import bisect_right
from typing import NamedTuple, Protocol


# Protocols and not `TrainConfig`, because `engine/config.py` imports this module to turn samples
# into iterations.
class TrainedBefore(Protocol):
    """Interface of `Recipe.continues`, the end of an earlier run: its properties `iteration` and
    `samples` are the numbers of iterations and of samples that the earlier run had finished when a
    new run continued it."""

    @property
    def iteration(self) -> int: ...
    @property
    def samples(self) -> int: ...


class Recipe(Protocol):
    """Interface of the settings from which a BatchSchedule is made, a part of `TrainConfig`'s:
    `global_batch_size` in sequences; `rampup_batch_size`, its growth as (start, increment,
    samples), or None; and `continues`, the end of the earlier run that the run continues, a
    TrainedBefore, or None."""

    @property
    def global_batch_size(self) -> int: ...
    @property
    def rampup_batch_size(self) -> tuple[int, int, int] | None: ...
    @property
    def continues(self) -> TrainedBefore | None: ...


class _Phase(NamedTuple):
    """Phase of a batch schedule, consecutive iterations with one batch size: its first iteration,
    the number of samples before it, and the batch size in sequences."""

    iteration: int
    """Number of the phase's first iteration, counted from 0; the iterations of a continued run
    count too."""
    sample: int
    """Number of samples that are taken before the phase; a continued run's samples count too."""
    batch_size: int


class BatchSchedule:
    """Batch sizes of a training. The method `batch_size` returns the number of sequences in an
    iteration's global batch, `samples_before` the number of samples in all iterations before it,
    and `whole_iterations` how many iterations a number of samples fills. Iterations are counted
    from 0.

    With `train.rampup_batch_size` = (start, increment, samples) the batch grows from start by
    increment, each time that an equal part of the samples has been taken; after all samples it is
    `train.global_batch_size`. A run that continues another counts on from the other run's
    iterations and samples.
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
        """Return the number of sequences in the global batch of `iteration`, counted from 0; the
        iterations of a continued run count too, but their sizes are not known: each gets this run's
        first size."""
        return self._phase(iteration).batch_size

    def samples_before(self, iteration: int) -> int:
        """Return the number of samples in all iterations before `iteration`, counted from 0; the
        iterations and samples of the earlier run that this one continues count too. For an
        iteration of the earlier run the number is a guess, reckoned back from that run's end by
        this run's first batch size."""
        phase = self._phase(iteration)
        return phase.sample + (iteration - phase.iteration) * phase.batch_size

    def whole_iterations(self, samples: float) -> int:
        """Return the number of whole iterations, from the start of the training, that `samples`
        samples fill; `samples` need not be an integer, and an incomplete last batch is not counted.
        If the training continues another run, the samples and iterations of that run count in both
        numbers."""
        # Searched and not divided, because a growing batch has no fixed size. A batch has at least
        # one sample, so `samples` iterations are enough to search.
        return bisect_right(range(int(samples) + 1), samples, key=self.samples_before) - 1

    def _phase(self, iteration: int) -> _Phase:
        # At least 0: an iteration before a seam precedes every phase, and index -1 would be the
        # last phase.
        return self._phases[
            max(bisect_right(self._phases, iteration, key=lambda phase: phase.iteration) - 1, 0)
        ]


def _ramp(
    start: int, increment: int, samples: int, steps: int, iteration: int, taken: int
) -> list[_Phase]:
    """Return a list of the _Phases, in order, of a batch size that grows after `iteration`
    iterations and `taken` samples. The sizes `start`, `start + increment` and on, `steps` in
    number, share the training's first `samples` samples equally; the next size then stays, in the
    last phase.

    A size whose samples earlier batches have taken is left out.
    """
    phases = []
    for step in range(steps):
        # A step whose samples are taken already has no iterations: a large batch passed over it.
        if samples * (step + 1) > taken * steps:
            batch_size = start + step * increment
            phases.append(_Phase(iteration, taken, batch_size))
            # In whole numbers: Megatron-LM's ramp divides in floating point, and a step could come
            # one iteration late.
            left = samples * (step + 1) - taken * steps
            count = -(-left // (batch_size * steps))
            iteration += count
            taken += count * batch_size
    return [*phases, _Phase(iteration, taken, start + steps * increment)]
