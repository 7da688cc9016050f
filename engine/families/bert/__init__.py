"""BERT: sentence pairs with masked tokens (2019 paper, Section 5.3). Imports no torch.

The pairs of an iteration are a function of (seed, iteration, data-parallel rank).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from data_pipeline.tokens.samples import blending_indices, normalized
from data_pipeline.tokens.sentence_pairs import PairSample, PairSamples
from data_pipeline.tokens.sentences import Vocabulary
from data_pipeline.tokens.special_tokens import MASKED_SHARE
from data_pipeline.tokens.token_file import TokenFile
from data_pipeline.tokens.tokenizer import Tokenizer
from engine.config import RunConfig
from engine.data.batch_schedule import BatchSchedule
from engine.data.batches import Microbatch, PairArrays, TrainingOrder, ValidationOrder, place_groups
from engine.family import ClosedForms, Family, TokenFiles
from engine.parallel.layout import PipelineStage


class BertForms(ClosedForms):
    """Closed forms of BERT, which adds segment embeddings, a masked head, a pooler and sentence order to GPT-2."""

    is_causal = False

    def parameters(self, stage: PipelineStage, tp: int = 1) -> int:
        """Parameters of GPT-2, segments, the head's dense layer, norm and bias, pooler and sentence order."""
        h = self.h
        head = (h * h + 3 * h + self.v // tp) + (h * h + h) + (2 * h + 2)
        return super().parameters(stage, tp) + stage.is_first * 2 * h + stage.is_last * head

    def head_columns(self) -> float:
        """The dense layer runs at every token, the logits only at the masked ones."""
        return self.v * MASKED_SHARE + self.h


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


def _training_order(config: RunConfig, parts: TokenFiles, iterations: int, tokenizer: Path | None) -> TrainingOrder:
    pairs, schedule = _pairs(config, parts, tokenizer), BatchSchedule(config.train)
    return PairTrainingBatches(pairs, schedule, config.train.microbatch_size, iterations)


def _validation_order(config: RunConfig, parts: TokenFiles, tokenizer: Path) -> ValidationOrder:
    return PairValidationBatches(_pairs(config, parts, tokenizer))


def _pairs(config: RunConfig, parts: TokenFiles, tokenizer: Path | None) -> PairSource:
    vocabulary = read_vocabulary(tokenizer, config.model.text_vocab_size)
    return PairSource(parts, vocabulary, config.model.seq_length, config.train.seed)


FAMILY = Family("engine.families.bert.model:BERT", BertForms, _training_order, _validation_order)
