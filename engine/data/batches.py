"""Tokens of an iteration: a pure function of (seed, iteration, data-parallel coordinate). Imports
no torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mlm_repro.data_pipeline.tokens.samples import blending_indices, normalized
from mlm_repro.data_pipeline.tokens.sentence_pairs import PairSample
from mlm_repro.data_pipeline.tokens.token_file import TokenFile
from mlm_repro.engine.batch_schedule import BatchSchedule
from mlm_repro.lineage.errors import BadInput


@dataclass(frozen=True)
class Microbatch:
    """Sequences of one microbatch: `tokens` are their ids [b, s + 1], for a BERT [b, s]; `places`
    are their indices in the global batch or, in the validation of a model without memory, their
    numbers in the split; `pairs` has a BERT's PairSamples, with the targets, and is empty for
    another model."""

    tokens: NDArray[np.int64]
    places: tuple[int, ...]
    pairs: Sequence[PairSample] = ()
    """PairSamples of a BERT, one for each sequence: besides tokens, their targets, token types and
    lengths. Empty for another model."""


Take = Callable[[Sequence[int], tuple[int, ...]], Microbatch]
"""Function (sample numbers, their indices in the global batch) → Microbatch of these samples, in
order."""


def text_of(sample: Callable[[int], NDArray[np.int64]]) -> Take:
    """Return a function (sample numbers, their indices in the global batch) → Microbatch of text:
    its `tokens` [b, s + 1] have a row for each number, in order, and its `places` are the indices.
    `sample` is a function (sample number) → the sample's tokens, [s + 1]."""
    return lambda numbers, places: Microbatch(
        np.stack([sample(number) for number in numbers]), places
    )


@dataclass(frozen=True)
class TrainingOrder:
    """Order of training: its method `microbatches` yields the Microbatches of an iteration for a
    data-parallel rank. Samples come by ascending number, each once, unless a subclass overrides the
    method `number`. `schedule` has the global batch size of each iteration, and `take` is a
    function that makes a Microbatch from a sequence of sample numbers and a tuple of their indices
    in the global batch."""

    schedule: BatchSchedule
    microbatch_size: int
    take: Take

    def microbatches(self, iteration: int, dp_rank: int, dp: int) -> Iterator[Microbatch]:
        """Yield the Microbatches of `iteration` (from 0) for the data-parallel rank `dp_rank` of
        `dp`: in order, its contiguous share of that iteration's global batch, `microbatch_size`
        sequences in each. The caller makes sure that `dp` times this size divides the global batch:
        nothing is checked here."""
        for places in place_groups(
            self.schedule.batch_size(iteration), self.microbatch_size, dp_rank, dp
        ):
            yield self.take([self.number(iteration, place) for place in places], places)

    def number(self, iteration: int, place: int) -> int:
        """Return the number of the sample at an index of the global batch of `iteration`, the
        argument `place`, both counted from 0. Here samples are numbered from 0 through the whole
        training; a subclass for another order overrides this."""
        return self.schedule.samples_before(iteration) + place


# The same for every iteration of one size, so that a stream of text stays on its rank.
def place_groups(
    global_batch_size: int, microbatch_size: int, dp_rank: int, dp: int
) -> Iterator[tuple[int, ...]]:
    """Yield, for each microbatch of data-parallel rank `dp_rank` of `dp`, a tuple of the indices of
    its `microbatch_size` sequences in the global batch of `global_batch_size` sequences, counted
    from 0. A rank's share of the batch is contiguous. The caller makes sure that `dp` times
    `microbatch_size` divides the batch: nothing is checked here."""
    share = global_batch_size // dp
    for first in range(dp_rank * share, (dp_rank + 1) * share, microbatch_size):
        yield tuple(range(first, first + microbatch_size))


@dataclass(frozen=True)
class ValidationOrder:
    """Order of validation, whose method `microbatches` yields the microbatches of one data-parallel
    rank: sequences of the validation split from the first on, each once, dealt to the ranks in
    turn. The order has `num_samples` sequences in all, and a validation may take fewer. `take`, a
    function (sequence numbers, the same once more) → Microbatch, makes each microbatch."""

    num_samples: int
    take: Take
    are_streams: ClassVar[bool] = False
    """True if successive microbatches with the same indices continue the same text."""

    def microbatches(
        self, num_samples: int, batch_size: int, dp_rank: int, dp: int
    ) -> Iterator[Microbatch]:
        """Yield the Microbatches of data-parallel rank `dp_rank` of `dp`, each of `batch_size`
        sequences, the last perhaps of fewer. The ranks together take the first `num_samples`
        sequences, or all if the order has fewer; each rank takes every `dp`-th."""
        # Every dp-th sequence, so that the shares of ranks differ by one at most.
        own = range(dp_rank, min(num_samples, self.num_samples), dp)
        for start in range(0, len(own), batch_size):
            numbers = tuple(own[start : start + batch_size])
            yield self.take(numbers, numbers)


def validation_text(parts: Sequence[tuple[TokenFile, float]], seq_length: int) -> ValidationOrder:
    """Return the ValidationOrder of a split's text, cut into consecutive sequences of `seq_length`
    + 1 tokens that overlap by one, not shuffled; the rest of a file that fills no sequence is left
    out. `parts` are the split's token files with their weights.

    Several token files are blended by weight, and each sequence is taken once, until one file is
    exhausted. Raises BadInput if a file is shorter than one sequence.
    """
    files = [token_file for token_file, _ in parts]
    # Without the last token, which is a target only.
    sizes = np.array([(len(file.tokens) - 1) // seq_length for file in files])
    if sizes.min() < 1:
        tokens = len(files[sizes.argmin()].tokens)
        raise BadInput(
            f"a token file of the dataset's validation split has {tokens} tokens, and one sequence"
            f" needs {seq_length} + 1: make the split larger or model.seq_length smaller"
        )
    # One draw more than there are sequences, so that some dataset is exhausted in it.
    datasets, numbers = blending_indices(
        normalized([weight for _, weight in parts]), int(sizes.sum()) + 1
    )

    def sequence(number: int) -> NDArray[np.int64]:
        start = int(numbers[number]) * seq_length
        return np.asarray(
            files[datasets[number]].tokens[start : start + seq_length + 1], dtype=np.int64
        )

    return ValidationOrder(int(np.argmax(numbers >= sizes[datasets])), text_of(sequence))
