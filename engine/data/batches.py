"""Tokens of an iteration: a pure function of (seed, iteration, data-parallel coordinate). Imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from data_pipeline.tokens.samples import PackedSamples, blending_indices, normalized, training_samples
from data_pipeline.tokens.token_file import TokenFile
from engine.data.batch_schedule import BatchSchedule
from lineage.errors import BadInput


@dataclass(frozen=True)
class PairArrays:
    """Arrays that a BERT's sequences have besides tokens."""

    targets: NDArray[np.int64]
    """Original of each masked token, -1 elsewhere, [b, s]."""
    token_types: NDArray[np.int64]
    """Part of the pair that each token belongs to, [b, s]."""
    lengths: NDArray[np.int64]
    """Tokens before the padding, [b]."""
    is_swapped: NDArray[np.int64]
    """1 where the second part came first in its document, [b]."""


@dataclass(frozen=True)
class Microbatch:
    """Token ids [b, s + 1], for a BERT [b, s], and the places of the sequences in the global batch."""

    tokens: NDArray[np.int64]
    places: tuple[int, ...]
    pairs: PairArrays | None = None


class TrainingOrder(Protocol):
    """The training sequences of every iteration."""

    def microbatches(self, iteration: int, dp_rank: int, dp: int) -> Iterator[Microbatch]:
        """This rank's microbatches of `iteration` (from 0)."""


class ValidationOrder(Protocol):
    """The sequences of the validation split."""

    are_streams: ClassVar[bool]
    """True if microbatches of the same places follow each other in the text."""
    num_samples: int

    def microbatches(self, num_samples: int, batch_size: int, dp_rank: int, dp: int) -> Iterator[Microbatch]:
        """This rank's share of about `num_samples` sequences, `batch_size` together where the order allows it."""


class TrainingBatches:
    """Training sequences of one token file, or of several with their weights."""

    def __init__(
        self, parts: Sequence[tuple[TokenFile, float]], seq_length: int, schedule: BatchSchedule, microbatch_size: int,
        iterations: int, seed: int,
    ) -> None:  # fmt: skip
        self._schedule, self._micro = schedule, microbatch_size
        self.samples = training_samples(parts, schedule.samples_before(iterations), seq_length, seed)

    def microbatches(self, iteration: int, dp_rank: int, dp: int) -> Iterator[Microbatch]:
        first = self._schedule.samples_before(iteration)
        for places in place_groups(self._schedule.batch_size(iteration), self._micro, dp_rank, dp):
            tokens = np.stack([self.samples.sample(first + place) for place in places])
            yield Microbatch(tokens, places)


class TrainingStreams:
    """Training sequences of a model with memory: each place of the global batch continues where it stopped.

    The documents, shuffled as for other models, are one line of tokens; place p reads the p-th of equal parts of it. A
    place that a growing batch adds later begins as far into its part as the other places are.
    """

    def __init__(
        self, token_file: TokenFile, seq_length: int, schedule: BatchSchedule, microbatch_size: int, iterations: int,
        seed: int,
    ) -> None:  # fmt: skip
        self._schedule, self._micro, self._iterations = schedule, microbatch_size, iterations
        self.samples = PackedSamples(token_file, iterations * schedule.batch_size(iterations - 1), seq_length, seed)

    def microbatches(self, iteration: int, dp_rank: int, dp: int) -> Iterator[Microbatch]:
        for places in place_groups(self._schedule.batch_size(iteration), self._micro, dp_rank, dp):
            numbers = [place * self._iterations + iteration for place in places]
            yield Microbatch(np.stack([self.samples.consecutive(number) for number in numbers]), places)


def place_groups(global_batch_size: int, microbatch_size: int, dp_rank: int, dp: int) -> Iterator[tuple[int, ...]]:
    """Places of a rank's microbatches, in order, in its part of the global batch."""
    each = global_batch_size // dp
    for first in range(dp_rank * each, (dp_rank + 1) * each, microbatch_size):
        yield tuple(range(first, first + microbatch_size))


class ValidationBatches:
    """The validation split cut into consecutive sequences, not shuffled.

    Several datasets are blended by weight, and each sequence is taken once, until one dataset has no more.
    """

    are_streams: ClassVar = False

    def __init__(self, parts: Sequence[tuple[TokenFile, float]], seq_length: int) -> None:
        self._files, self._seq_length = [token_file for token_file, _ in parts], seq_length
        sizes = np.array([(len(file.tokens) - 1) // seq_length for file in self._files])
        if sizes.min() < 1:
            tokens = len(self._files[sizes.argmin()].tokens)
            raise BadInput(f"the validation split has {tokens} tokens, fewer than {seq_length} + 1")
        weights = normalized([weight for _, weight in parts])
        self._datasets, self._numbers = blending_indices(weights, int(sizes.sum()) + 1)
        self.num_samples = int(np.argmax(self._numbers >= sizes[self._datasets]))

    def microbatches(self, num_samples: int, batch_size: int, dp_rank: int, dp: int) -> Iterator[Microbatch]:
        mine = range(dp_rank, min(num_samples, self.num_samples), dp)
        for start in range(0, len(mine), batch_size):
            numbers = tuple(mine[start : start + batch_size])
            yield Microbatch(np.stack([self._sequence(number) for number in numbers]), numbers)

    def _sequence(self, number: int) -> NDArray[np.int64]:
        start = int(self._numbers[number]) * self._seq_length
        tokens = self._files[self._datasets[number]].tokens
        return np.asarray(tokens[start : start + self._seq_length + 1], dtype=np.int64)


class ValidationStreams:
    """The validation split for a model with memory: each place of the batch reads its own part from end to end."""

    are_streams: ClassVar = True

    def __init__(self, token_file: TokenFile, seq_length: int, global_batch_size: int, microbatch_size: int) -> None:
        self._file, self._seq_length = token_file, seq_length
        self._global, self._micro = global_batch_size, microbatch_size
        self.num_samples = self._whole_rows((len(token_file.tokens) - 1) // seq_length)
        if not self.num_samples:
            raise BadInput(
                f"the validation split has {len(token_file.tokens)} tokens, fewer than {global_batch_size} streams "
                f"of {seq_length} + 1"
            )

    def microbatches(self, num_samples: int, batch_size: int, dp_rank: int, dp: int) -> Iterator[Microbatch]:
        """This rank's share of `num_samples` sequences in whole rows; microbatches are those of training."""
        count = max(min(self._whole_rows(num_samples), self.num_samples) // self._global, 1)
        for places in place_groups(self._global, self._micro, dp_rank, dp):
            for segment in range(count):
                starts = [(place * count + segment) * self._seq_length for place in places]
                rows = [self._file.tokens[start : start + self._seq_length + 1] for start in starts]
                yield Microbatch(np.stack(rows).astype(np.int64), places)

    def _whole_rows(self, samples: int) -> int:
        return samples // self._global * self._global
