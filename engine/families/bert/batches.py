"""Sentence pairs of each BERT iteration, a function of (seed, iteration, data-parallel rank). Imports no torch."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from data_pipeline.tokens.samples import blending_indices, normalized
from data_pipeline.tokens.sentence_pairs import PairSample, PairSamples
from data_pipeline.tokens.sentences import Vocabulary
from data_pipeline.tokens.token_file import TokenFile
from data_pipeline.tokens.tokenizer import Tokenizer
from engine.data.batch_schedule import BatchSchedule
from engine.data.batches import Microbatch, PairArrays, place_groups


class PairSource:
    """Samples of one token file, or of several blended by weight."""

    def __init__(
        self, parts: Sequence[tuple[TokenFile, float]], vocabulary: Vocabulary, seq_length: int, seed: int
    ) -> None:
        self._samples = [PairSamples(file, vocabulary, seq_length, seed) for file, _ in parts]
        self._weights = normalized([weight for _, weight in parts])
        self._blend = blending_indices(self._weights, 0)

    def prepare(self, num_samples: int | None = None) -> int:
        """Prepare `num_samples` samples and return their number. By default they end when a file runs out."""
        sizes = np.array([len(samples) for samples in self._samples])
        if len(sizes) > 1:
            self._blend = blending_indices(self._weights, num_samples or int(sizes.sum()) + 1)
        if num_samples is None:
            datasets, numbers = self._blend
            num_samples = int(np.argmax(numbers >= sizes[datasets])) if len(sizes) > 1 else int(sizes[0])
        return num_samples

    def microbatch(self, numbers: Sequence[int], places: tuple[int, ...]) -> Microbatch:
        """A microbatch of the samples with these numbers."""
        samples = [self._sample(number) for number in numbers]
        return Microbatch(
            np.stack([sample.tokens for sample in samples]),
            places,
            PairArrays(
                targets=np.stack([sample.targets for sample in samples]),
                token_types=np.stack([sample.token_types for sample in samples]),
                lengths=np.array([sample.length for sample in samples]),
                is_swapped=np.array([sample.is_swapped for sample in samples]),
            ),
        )

    def _sample(self, number: int) -> PairSample:
        if len(self._samples) == 1:
            return self._samples[0].sample(number)
        datasets, numbers = self._blend
        return self._samples[datasets[number]].sample(int(numbers[number]))


class PairTrainingBatches:
    """Training samples in order."""

    def __init__(self, source: PairSource, schedule: BatchSchedule, microbatch_size: int, iterations: int) -> None:
        self._source, self._schedule, self._micro = source, schedule, microbatch_size
        source.prepare(schedule.samples_before(iterations))

    def microbatches(self, iteration: int, dp_rank: int, dp: int) -> Iterator[Microbatch]:
        first = self._schedule.samples_before(iteration)
        for places in place_groups(self._schedule.batch_size(iteration), self._micro, dp_rank, dp):
            yield self._source.microbatch([first + place for place in places], places)


class PairValidationBatches:
    """Samples of the validation split, each once, with fixed masks."""

    are_streams: ClassVar = False

    def __init__(self, source: PairSource) -> None:
        self._source = source
        self.num_samples = source.prepare()

    def microbatches(self, num_samples: int, batch_size: int, dp_rank: int, dp: int) -> Iterator[Microbatch]:
        mine = range(dp_rank, min(num_samples, self.num_samples), dp)
        for start in range(0, len(mine), batch_size):
            numbers = mine[start : start + batch_size]
            yield self._source.microbatch(numbers, tuple(numbers))


def read_vocabulary(tokenizer: Path | None, vocab_size: int) -> Vocabulary:
    """The word table of a tokenizer's directory. Without one, every fourth token ends a sentence, for random tokens."""
    if tokenizer is not None:
        return Vocabulary.of(Tokenizer.load(tokenizer))
    every = np.ones(vocab_size, np.bool_)
    return Vocabulary(~every, ~every, every, np.arange(vocab_size) % 4 == 1, ~every, end_of_text=0)
