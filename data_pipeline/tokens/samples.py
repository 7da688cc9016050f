"""Training samples cut from token files: packed documents in Megatron-LM's order, blended by
weight.

The index is Megatron-LM's, array for array (`data/gpt_dataset.py` and `data/blendable_dataset.py`,
v2.6): documents shuffled and packed end to end, cut into samples of `seq_length` + 1 tokens that
overlap by one, samples shuffled.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlm_repro.data_pipeline.arrays import Integers, Integers32
from mlm_repro.data_pipeline.tokens.token_file import TokenFile
from mlm_repro.lineage.errors import BadInput, IntegrityFailure


@dataclass(frozen=True)
class SampleIndex:
    """Megatron-LM's index of the training samples in a token file, three arrays: the order of
    documents, where each sample starts, and the order of samples."""

    documents: Integers32
    """Order of documents over all epochs, [E·N]."""
    samples: Integers
    """Start of each sample in packed order, and the end of the last, as (index in `documents`,
    token offset), [n + 1, 2]."""
    shuffle: Integers
    """Order in which samples are visited, as their numbers in packed order, [n]."""


def build_sample_index(
    sizes: Integers32, num_samples: int, seq_length: int, seed: int
) -> SampleIndex:
    """Return a SampleIndex of at least `num_samples` samples, of `seq_length` + 1 tokens each, over
    documents of `sizes` tokens, [N]; documents and samples are shuffled by `seed`. Raises BadInput
    if all documents together are shorter than one sample.

    When the last epoch would be used by less than 80 %, it is shuffled apart from the others, so
    that no document comes once more often than the rest before the others have come (Megatron-LM
    v2, `separate_last_epoch`).
    """
    total = int(sizes.sum(dtype=np.int64))
    if total <= seq_length:
        raise BadInput(
            f"a token file of the dataset has {total} tokens, fewer than one sample of"
            f" model.seq_length + 1 = {seq_length} + 1: use a larger dataset or shorter sequences"
        )
    epochs = 1
    while (epochs * total - 1) // seq_length < num_samples:
        epochs += 1
    all_samples = (epochs * total - 1) // seq_length
    before_last = ((epochs - 1) * total - 1) // seq_length
    separate = epochs > 1 and num_samples - before_last < int(0.80 * ((total - 1) // seq_length))
    random = np.random.RandomState(seed)
    one_epoch = np.arange(len(sizes), dtype=np.int32)
    repeats = [epochs - 1, 1] if separate else [epochs]
    orders_of_documents = [np.tile(one_epoch, repeat) for repeat in repeats]
    for order_of_documents in orders_of_documents:
        random.shuffle(order_of_documents)
    documents = np.concatenate(orders_of_documents)
    ends = np.cumsum(np.append(0, sizes[documents]))
    starts = np.arange(all_samples + 1, dtype=np.int64) * seq_length
    position = np.searchsorted(ends, starts, side="right") - 1
    samples = np.stack([position, starts - ends[position]], axis=1)
    cuts = [0, before_last, all_samples] if separate else [0, all_samples]
    orders = [np.arange(low, high, dtype=np.int64) for low, high in pairwise(cuts)]
    for order in orders:
        random.shuffle(order)
    return SampleIndex(documents, samples, np.concatenate(orders))


class SamplePiece(NamedTuple):
    """Tokens of one document within a sample, a read-only view of its token file `file`, with the
    document's index there and the first token's position in the document. Each sequence of the
    token file counts as a document, as in Megatron-LM."""

    document: int
    start: int
    """Position in the document of the first of `tokens`."""
    tokens: NDArray[Any]
    file: TokenFile


class PackedSamples:
    """Samples of one token file, at least `num_samples`, of s + 1 consecutive tokens each, with s
    the sequence length. Documents are repeated as often as needed, shuffled by `seed` with their
    repetitions, packed end to end and cut so that a sample's last token is the next one's first;
    then samples are shuffled too. The method `sample` returns one by its number; there is no `[]`.
    Raises BadInput if all documents together are shorter than one sample."""

    def __init__(self, token_file: TokenFile, num_samples: int, seq_length: int, seed: int) -> None:
        self._file = token_file
        self._seq_length = seq_length
        self.index = build_sample_index(token_file.sizes, num_samples, seq_length, seed)

    def __len__(self) -> int:
        return len(self.index.shuffle)

    def pieces(self, number: int) -> Iterator[SamplePiece]:
        """Yield a SamplePiece for each document, whole or in part, that makes up the `number`-th
        sample, from 0, in training order."""
        return self._pieces(int(self.index.shuffle[number]))

    def consecutive(self, number: int) -> Integers:
        """Return the token ids of the `number`-th sample, from 0, in packed order, before samples
        are shuffled, a new int64 array [s + 1]. Its last token is the first of the next sample."""
        return np.concatenate([piece.tokens for piece in self._pieces(number)]).astype(np.int64)

    def _pieces(self, packed: int) -> Iterator[SamplePiece]:
        (position, offset), wanted = self.index.samples[packed], self._seq_length + 1
        while wanted > 0:
            document = int(self.index.documents[position])
            tokens = self._file[document][offset : offset + wanted]
            if len(tokens):
                yield SamplePiece(document, int(offset), tokens, self._file)
            wanted -= len(tokens)
            position += 1
            offset = 0

    def sample(self, number: int) -> Integers:
        """Return the token ids of the `number`-th sample, from 0, in training order, a new int64
        array [s + 1]. Raises IndexError if there are not so many samples."""
        return np.concatenate([piece.tokens for piece in self.pieces(number)]).astype(np.int64)


class BlendedSamples:
    """Samples of several token files, `num_samples` in all, of `seq_length` + 1 tokens each. The
    method `sample` returns one by its number; there are no `len` and no `[]`. Each file is drawn in
    proportion to its weight, its samples in the order of a PackedSamples with `seed`; `parts` are
    pairs of a file and its weight, in any scale. Raises BadInput if one file is shorter than one
    sample."""

    def __init__(
        self, parts: Sequence[tuple[TokenFile, float]], num_samples: int, seq_length: int, seed: int
    ) -> None:
        weights = normalized([weight for _, weight in parts])
        self.datasets, self.numbers = blending_indices(weights, num_samples)
        used = np.bincount(self.datasets, minlength=len(parts))
        self._parts = [
            PackedSamples(
                token_file,
                max(math.ceil(num_samples * weight * 1.005), int(count)),
                seq_length,
                seed,
            )
            for (token_file, _), weight, count in zip(parts, weights, used, strict=True)
        ]

    def pieces(self, number: int) -> Iterator[SamplePiece]:
        """Yield a SamplePiece for each document, whole or in part, that makes up the `number`-th
        sample, from 0, in training order. They are from one token file."""
        return self._parts[self.datasets[number]].pieces(int(self.numbers[number]))

    def sample(self, number: int) -> Integers:
        """Return the token ids of the `number`-th sample, from 0, in training order, a new int64
        array [s + 1]."""
        return self._parts[self.datasets[number]].sample(int(self.numbers[number]))


def training_samples(
    parts: Sequence[tuple[TokenFile, float]], num_samples: int, seq_length: int, seed: int
) -> PackedSamples | BlendedSamples:
    """Return the training samples, of `seq_length` + 1 tokens each, in the order of training,
    shuffled by `seed`: a PackedSamples of the one token file, at least `num_samples`, or a
    BlendedSamples of several in proportion to their weights, `num_samples` in all. `parts` are
    pairs of a token file and its weight. Raises BadInput if a file is shorter than one sample."""
    if len(parts) == 1:
        return PackedSamples(parts[0][0], num_samples, seq_length, seed)
    return BlendedSamples(parts, num_samples, seq_length, seed)


def known_tokens(tokens: Integers, vocab_size: int) -> Integers:
    """Return the array `tokens` of token ids unchanged. Raises IntegrityFailure for a token that is
    negative or not below `vocab_size`; every rank that meets one prints the error, not only rank 0.

    A divided embedding would otherwise silently treat it as another rank's token.
    """
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise IntegrityFailure(
            "the dataset's token files have the token id"
            f" {tokens.min() if tokens.min() < 0 else tokens.max()}, outside of the model's"
            f" vocabulary, which ends at {vocab_size - 1}: move the dataset away, and make it again"
            " with `mlm-data run` or `import`",
            on_every_rank=True,
        )
    return tokens


def normalized(weights: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `weights`, a sequence of numbers, divided by their sum, as a new float64 array."""
    array = np.array(weights, np.float64)
    return array / array.sum()


def blending_indices(weights: NDArray[np.float64], size: int) -> tuple[NDArray[np.int16], Integers]:
    """Return two arrays [size]: for each of `size` samples the index of its dataset, int16, and the
    sample's number in that dataset, int64. The numbers of a dataset count up from 0 without an end:
    it is not checked that the dataset has as many samples.

    Each sample comes from the dataset that is furthest behind its weight, the first of equals
    (Megatron-LM megatron/data/helpers.cpp, build_blending_indices). `weights` add up to 1.
    """
    datasets = np.empty(size, np.int16)
    numbers = np.empty(size, np.int64)
    # Megatron-LM divides by the sum a second time, which can change the last bit.
    _compiled_blend()(normalized(weights), datasets, numbers)
    return datasets, numbers


@cache
def _compiled_blend() -> Callable[..., Any]:
    """Return a compiled function of three arrays: weights, which add up to 1, datasets and numbers.
    It fills the latter two: for each sample the index of the dataset that is furthest behind its
    weight, and the sample's number there. It is compiled at first use, so that a program that only
    reads facts about a dataset never loads numba."""
    from mlm_repro.lineage.loops import compiled

    return compiled(_blend)


def _blend(weights: Any, datasets: Any, numbers: Any) -> None:
    taken = np.zeros(len(weights), np.int64)
    for number in range(len(datasets)):
        behind = weights * max(number, 1) - taken
        chosen = np.argmax(behind)
        datasets[number] = chosen
        numbers[number] = taken[chosen]
        taken[chosen] += 1
