"""Which tokens an iteration sees: a pure function of (seed, iteration, data-parallel coordinate). Imports no torch.

The index is Megatron-LM's, array for array (`data/gpt_dataset.py`, v2.6): documents shuffled and packed end to end,
cut into samples of `seq_length` + 1 tokens that overlap by one, samples shuffled.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from data_pipeline.token_file import TokenFile
from lineage.errors import BadInput


@dataclass(frozen=True)
class SampleIndex:
    """Megatron-LM's three index arrays."""

    documents: NDArray[np.int32]
    """Order of documents over all epochs, [E·N]."""
    samples: NDArray[np.int64]
    """Start of each sample as (position in `documents`, token offset), [n + 1, 2]."""
    shuffle: NDArray[np.int64]
    """Order in which samples are visited, [n]."""


def build_sample_index(sizes: NDArray[np.int32], num_samples: int, seq_length: int, seed: int) -> SampleIndex:
    """Index for at least `num_samples` samples over documents of `sizes` tokens.

    When the last epoch would be used by less than 80 %, it is shuffled apart from the others, so that no document
    comes once more often than the rest before the others have come (Megatron-LM v2, `separate_last_epoch`).
    """
    total = int(sizes.sum(dtype=np.int64))
    if total <= seq_length:
        raise BadInput(f"the dataset has {total} tokens, fewer than one sample of {seq_length} + 1")
    epochs = 1
    while (epochs * total - 1) // seq_length < num_samples:
        epochs += 1
    all_samples = (epochs * total - 1) // seq_length
    before_last = ((epochs - 1) * total - 1) // seq_length
    separate = epochs > 1 and num_samples - before_last < int(0.80 * ((total - 1) // seq_length))
    random = np.random.RandomState(seed)
    one_epoch = np.arange(len(sizes), dtype=np.int32)
    repeats = [epochs - 1, 1] if separate else [epochs]
    parts = [np.tile(one_epoch, repeat) for repeat in repeats]
    for part in parts:
        random.shuffle(part)
    documents = np.concatenate(parts)
    ends = np.concatenate([[0], np.cumsum(sizes[documents], dtype=np.int64)])
    starts = np.arange(all_samples + 1, dtype=np.int64) * seq_length
    position = np.searchsorted(ends, starts, side="right") - 1
    samples = np.stack([position, starts - ends[position]], axis=1)
    cuts = [0, before_last, all_samples] if separate else [0, all_samples]
    orders = [np.arange(low, high, dtype=np.int64) for low, high in pairwise(cuts)]
    for order in orders:
        random.shuffle(order)
    return SampleIndex(documents, samples, np.concatenate(orders))


@dataclass(frozen=True)
class Microbatch:
    """Token ids [b, s + 1] and the places of its sequences in the global batch."""

    tokens: NDArray[np.int64]
    places: tuple[int, ...]


class TrainingBatches:
    """Training sequences in their order."""

    def __init__(
        self, token_file: TokenFile, seq_length: int, global_batch_size: int, microbatch_size: int,
        iterations: int, seed: int,
    ) -> None:  # fmt: skip
        self._file, self._seq_length = token_file, seq_length
        self._global, self._micro = global_batch_size, microbatch_size
        self.index = build_sample_index(token_file.sizes, iterations * global_batch_size, seq_length, seed)

    def sample(self, number: int) -> NDArray[np.int64]:
        """The `number`-th sequence in training order, [s + 1] token ids."""
        which = self.index.shuffle[number]
        (position, offset), wanted = self.index.samples[which], self._seq_length + 1
        parts: list[NDArray[np.int64]] = []
        while wanted > 0:
            document = self._file[int(self.index.documents[position])]
            part = document[offset : offset + wanted].astype(np.int64)
            parts.append(part)
            wanted -= len(part)
            position, offset = position + 1, 0
        return np.concatenate(parts)

    def microbatches(self, iteration: int, dp_rank: int, dp: int) -> Iterator[Microbatch]:
        """This rank's microbatches of `iteration` (from 0): of each block of microbatch × dp sequences, its slice."""
        for block in range(0, self._global, self._micro * dp):
            first = block + dp_rank * self._micro
            places = tuple(range(first, first + self._micro))
            tokens = np.stack([self.sample(iteration * self._global + place) for place in places])
            yield Microbatch(tokens, places)


class ValidationBatches:
    """The validation split cut into consecutive sequences, not shuffled."""

    def __init__(self, token_file: TokenFile, seq_length: int) -> None:
        self._tokens, self._seq_length = token_file.tokens, seq_length
        self.num_samples = (len(token_file.tokens) - 1) // seq_length
        if self.num_samples < 1:
            raise BadInput(f"the validation split has {len(self._tokens)} tokens, fewer than {seq_length} + 1")

    def batches(self, num_samples: int, batch_size: int, dp_rank: int, dp: int) -> Iterator[NDArray[np.int64]]:
        """This rank's share of the first `num_samples` sequences, as [b, s + 1] arrays."""
        mine = range(dp_rank, min(num_samples, self.num_samples), dp)
        for start in range(0, len(mine), batch_size):
            rows = mine[start : start + batch_size]
            s = self._seq_length
            yield np.stack([np.asarray(self._tokens[i * s : i * s + s + 1], dtype=np.int64) for i in rows])
