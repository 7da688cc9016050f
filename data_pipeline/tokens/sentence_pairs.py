"""BERT's samples: two runs of sentences from one document, perhaps swapped, with some of their
tokens masked.

A sample is [CLS] A [SEP] B [SEP], padded. A and B follow each other in their document and half of
the time are swapped (sentence-order prediction, Lan et al. 2020). 15 % of the tokens are masked in
runs of one to three whole words, shorter ones more often, p ∝ 1/n. Of the masked tokens, 80 %
become [MASK], 10 % a random token, 10 % stay. The content of one sample follows Megatron-LM's
`megatron/core/datasets/{masked_dataset,bert_dataset}.py` draw by draw. The order of samples is this
project's own: every pair of runs once, shuffled, then again with other masks. So are the sentences
(see `sentences`).
"""

from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from mlm_repro.data_pipeline.arrays import Integers
from mlm_repro.data_pipeline.tokens.sentences import Sentences, Vocabulary
from mlm_repro.data_pipeline.tokens.special_tokens import MASKED_SHARE
from mlm_repro.data_pipeline.tokens.token_file import TokenFile
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.loops import call_first, compiled

LONGEST_RUN = 3
SHORT_EVERY = 10
"""One sample in this many, at random, gets a random target length below the longest."""

Tokens = Integers


class PairSample(NamedTuple):
    """A BERT sample: [CLS], then two runs of consecutive sentences with [SEP] after each, some
    tokens of them masked, then [PAD] to the end; `targets` has the original ids of the masked ones
    and -1 elsewhere. Arrays are int64 [seq_length]."""

    tokens: Tokens
    targets: Tokens
    """Original ids of masked tokens, -1 elsewhere."""
    token_types: Tokens
    """0 for [CLS] A [SEP], 1 for B [SEP], 0 for padding."""
    length: int
    """Number of tokens before the padding."""
    is_swapped: int
    """1 if B came first in the document, else 0."""


class Masking:
    """Masking of runs of whole words in token sequences, for a BERT to predict them. It is made for
    a vocabulary. Its method `apply` takes one sequence and a random state, and returns two arrays
    of the sequence's length: a masked copy, and the original ids where tokens are masked and -1
    elsewhere."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.cls, self.sep, self.mask, self.pad = vocabulary.special_ids

    def words(self, tokens: Tokens) -> list[list[int]]:
        """Return a list of the words of a sequence, in order, each word as the list of its tokens'
        positions. Special tokens such as [CLS] belong to no word."""
        is_special = np.isin(tokens, self.vocabulary.special_ids)
        plain = np.where(is_special, self.vocabulary.end_of_text, tokens)
        starts = self.vocabulary.word_starts(plain)
        starts[1:] |= is_special[:-1]
        words: list[list[int]] = []
        for position in np.flatnonzero(~is_special).tolist():
            if starts[position] or not words:
                words.append([position])
            else:
                words[-1].append(position)
        return words

    def apply(
        self, tokens: Tokens, target_length: int, random: np.random.RandomState
    ) -> tuple[Tokens, Tokens]:
        """Return two int64 arrays [tokens]: a copy of the sequence with some tokens masked, of
        which on average 80 % become [MASK], 10 % a random token and 10 % stay, and the original ids
        of all masked tokens, -1 elsewhere.

        Runs of one to LONGEST_RUN whole words are masked; special tokens never are. At most
        MASKED_SHARE of `target_length` tokens are masked, and no more than that share of the
        sequence, rounded, or one token. Draws are taken from `random`.
        """
        words = self.words(tokens)
        wanted = min(MASKED_SHARE * target_length, max(1, round(len(tokens) * MASKED_SHARE)))
        lengths = np.arange(1, LONGEST_RUN + 1)
        shares = 1 / lengths / (1 / lengths).sum()
        order = np.arange(len(words))
        random.shuffle(order)
        masked = tokens.copy()
        targets = np.full(len(tokens), -1, np.int64)
        count = 0
        for first in order.tolist():
            if count >= wanted:
                break
            chosen = int(random.choice(lengths, p=shares))
            fitting = (
                list(chain.from_iterable(words[first : first + length]))
                for length in range(chosen, 0, -1)
            )
            run = next((run for run in fitting if count + len(run) <= wanted), None)
            if run is None or (targets[run] >= 0).any():
                continue
            for position in run:
                targets[position] = tokens[position]
                masked[position] = self._replacement(int(tokens[position]), random)
            count += len(run)
        return masked, targets

    def _replacement(self, token: int, random: np.random.RandomState) -> int:
        if random.random_sample() < 0.8:
            return self.mask
        if random.random_sample() >= 0.5:
            return int(random.randint(0, len(self.vocabulary)))
        return token


class PairSamples:
    """BERT's samples of one token file, pairs of runs of sentences, for any number of passes over
    it, in an order and with masks drawn by `seed`. The method `sample` returns one by its number, a
    PairSample of `seq_length` tokens; there is no `[]`, and `len` is the number of samples in one
    pass. Raises BadInput if no document has two sentences."""

    def __init__(self, file: TokenFile, vocabulary: Vocabulary, seq_length: int, seed: int) -> None:
        self._file = file
        self._seq_length = seq_length
        self._seed = seed
        self.masking = Masking(vocabulary)
        self._longest = seq_length - 3
        self._sentences = Sentences.of(file, vocabulary, max(self._longest // 2, 1))
        self.index = self._map()
        if not len(self.index):
            raise BadInput(
                f"no document of the token file {file.prefix} has two sentences, and a BERT is"
                " trained on pairs of them: build the dataset from other text"
            )
        self._order: tuple[int, Integers] = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        """Return the number of samples, each a pair of runs of sentences, in one pass over the
        token file."""
        return len(self.index)

    def sample(self, number: int) -> PairSample:
        """Return the `number`-th sample, from 0, in training order as a PairSample. Each pass over
        the file has a new order and new masks."""
        epoch, index = divmod(number, len(self))
        return self.make(int(self._epoch(epoch)[index]), number)

    def make(self, place: int, number: int) -> PairSample:
        """Return as a PairSample the sample at row `place`, from 0, of the attribute `index`, which
        is in the file's order: split into its two parts, perhaps swapped, cut to its target length
        and masked. `number`, its number in training order, is added to the seed of these random
        draws, so that the same row has other masks in each pass over the file."""
        first, last, target = self.index[place].tolist()
        random = np.random.RandomState((self._seed + number) % 2**32)
        spans = zip(
            self._sentences.starts[first:last], self._sentences.ends[first:last], strict=True
        )
        sentences = [self._file.tokens[start:end] for start, end in spans]
        pivot = int(random.randint(1, len(sentences))) if len(sentences) >= 3 else 1
        is_swapped = bool(random.random_sample() < 0.5)
        a, b = (
            np.concatenate(run).astype(np.int64) for run in (sentences[:pivot], sentences[pivot:])
        )
        a, b = _trim(b, a, target, random) if is_swapped else _trim(a, b, target, random)
        cls = self.masking.cls
        sep = self.masking.sep
        tokens = np.concatenate([[cls], a, [sep], b, [sep]])
        s = self._seq_length
        padded = np.full(s, self.masking.pad)
        targets = np.full(s, -1)
        types = np.zeros(s, np.int64)
        padded[: len(tokens)], targets[: len(tokens)] = self.masking.apply(tokens, target, random)
        types[len(a) + 2 : len(tokens)] = 1
        return PairSample(padded, targets, types, len(tokens), int(is_swapped))

    def _epoch(self, epoch: int) -> Integers:
        if self._order[0] != epoch:
            order = np.random.RandomState((self._seed + epoch) % 2**32).permutation(len(self))
            self._order = (epoch, order)
        return self._order[1]

    def _map(self) -> Integers:
        """Return an int64 array [samples, 3] with a row for each sample of one pass over the file,
        in the file's order: the indices of its first sentence and of the sentence after its last,
        and its target length in tokens, special ones not counted. That is the longest length or,
        for some samples that the seed draws, a length from 2 to the longest, drawn too. A sample
        has at least two sentences of one document, the next ones until they have its target length
        or the document ends; it also takes the last sentence of a document if that would be left
        alone. A document of one sentence has no sample."""
        sizes = self._sentences.ends - self._sentences.starts
        draws = (
            np.random.RandomState(self._seed)
            .randint(0, 2**32, len(sizes) + len(self._sentences.documents), np.uint32)
            .astype(np.int64)
        )
        index = np.empty((len(sizes) // 2 + 1, 3), np.int64)
        count = call_first(
            _map_samples, sizes, self._sentences.documents, self._longest, draws, index
        )
        return index[:count].copy()


def _trim(
    a: Tokens, b: Tokens, target: int, random: np.random.RandomState
) -> tuple[Tokens, Tokens]:
    """Return a pair, the arrays `a` and `b`, cut so that together they have at most `target`
    tokens: one token after the other is removed from the longer array, or from `b` if both are
    equally long, at the start or the end as drawn from `random`. Both results are views and no
    copies."""
    spans = [[0, len(a)], [0, len(b)]]
    while sum(end - start for start, end in spans) > target:
        longer = spans[0] if spans[0][1] - spans[0][0] > spans[1][1] - spans[1][0] else spans[1]
        if random.random_sample() < 0.5:
            longer[0] += 1
        else:
            longer[1] -= 1
    return a[slice(*spans[0])], b[slice(*spans[1])]


@compiled
def _map_samples(sizes: Any, documents: Any, longest: int, draws: Any, index: Any) -> int:
    """Write the samples of one pass over the file to the first rows of `index` in order, each as
    its first sentence, the sentence after its last and its target length, at most `longest`, and
    return their number: Megatron-LM's build_mapping (megatron/core/datasets/helpers.cpp) with its
    generator's `draws`, one for each sentence and document, but documents with a sentence of more
    than 512 tokens are not left out here. `index` [rows, 3] must have room for all: a sample has at
    least two sentences. `sizes` are the numbers of tokens of the sentences, `documents` the index
    of each document's first sentence, then the number of sentences. A document of one sentence has
    no sample."""
    targets = np.where(draws % SHORT_EVERY == 0, 2 + draws % (longest - 1), longest)
    count = 0
    drawn = 0
    for document in range(len(documents) - 1):
        start = documents[document]
        last = documents[document + 1]
        length = 0
        if last - start < 2:
            continue
        target = targets[drawn]
        drawn += 1
        for sentence in range(start, last):
            length += sizes[sentence]
            left = last - sentence - 1
            if (length >= target and left > 1 and sentence + 1 - start >= 2) or left == 0:
                index[count, 0], index[count, 1], index[count, 2] = start, sentence + 1, target
                count += 1
                start = sentence + 1
                length = 0
                target = targets[drawn]
                drawn += 1
    return count
