"""BERT: sentence pairs with masked tokens (2019 paper, Section 5.3).

Imports no torch. The pairs of an iteration are a function of (seed, iteration, data-parallel rank).
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mlm_repro.data_pipeline.tokens.sentence_pairs import PairSamples
from mlm_repro.data_pipeline.tokens.sentences import Vocabulary
from mlm_repro.data_pipeline.tokens.special_tokens import MASKED_SHARE, SPECIAL_TOKENS
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.engine.batch_schedule import BatchSchedule
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.data.batches import Microbatch, Take, TrainingOrder, ValidationOrder
from mlm_repro.engine.family import ClosedForms, Family, TokenFiles
from mlm_repro.engine.parallel.layout import PipelineStage


class BertForms(ClosedForms):
    """Formulas for the parameters and FLOPs of a BERT, which adds segment embeddings, a masked
    head, a pooler and sentence order to GPT-2."""

    is_causal = False

    def parameters(self, stage: PipelineStage, tp: int = 1) -> int:
        """Return the number of parameters that one of `tp` tensor-parallel ranks holds of a
        pipeline stage: a GPT-2's; on the first stage also the segment embeddings; on the last also
        the masked head's dense layer, norm and bias, the pooler and the sentence-order head."""
        h = self.h
        head = (h * h + 3 * h + self.v // tp) + (h * h + h) + (2 * h + 2)
        return super().parameters(stage, tp) + stage.is_first * 2 * h + stage.is_last * head

    def head_columns(self) -> float:
        """Return the number of output columns that the head computes for a position, averaged over
        positions: h for its dense layer, which runs everywhere, plus the padded vocabulary times
        the share of masked positions."""
        return self.v * MASKED_SHARE + self.h


def pairs_of(samples: PairSamples) -> Take:
    """Return a function (sample numbers, their indices in the global batch) → Microbatch of the
    sentence pairs that `samples` has under these numbers."""

    def take(numbers: Sequence[int], places: tuple[int, ...]) -> Microbatch:
        pairs = [samples.sample(number) for number in numbers]
        return Microbatch(np.stack([pair.tokens for pair in pairs]), places, pairs)

    return take


def read_vocabulary(tokenizer: Path | None, vocab_size: int) -> Vocabulary:
    """Return the Vocabulary of a tokenizer's directory, which says which tokens begin words, end
    sentences or are special. Raises BadInput if the directory has no tokenizer.json or that lacks
    its end-of-text token, IntegrityFailure if that file is damaged.

    Without a tokenizer, for random tokens, each of `vocab_size` tokens begins a word and every
    fourth ends a sentence; the special tokens have the ids after these.
    """
    if tokenizer is not None:
        return Vocabulary.of(Tokenizer.load(tokenizer))
    all_tokens = np.ones(vocab_size, np.bool_)
    special = range(vocab_size, vocab_size + len(SPECIAL_TOKENS))
    return Vocabulary(
        ~all_tokens,
        ~all_tokens,
        all_tokens,
        np.arange(vocab_size) % 4 == 1,
        ~all_tokens,
        0,
        tuple(special),
    )


def _training_order(
    config: RunConfig, parts: TokenFiles, iterations: int, tokenizer: Path | None
) -> TrainingOrder:
    take = pairs_of(_samples(config, parts, tokenizer))
    return TrainingOrder(BatchSchedule(config.train), config.train.microbatch_size, take)


def _validation_order(config: RunConfig, parts: TokenFiles, tokenizer: Path) -> ValidationOrder:
    samples = _samples(config, parts, tokenizer)
    return ValidationOrder(len(samples), pairs_of(samples))


def _samples(config: RunConfig, parts: TokenFiles, tokenizer: Path | None) -> PairSamples:
    vocabulary = read_vocabulary(tokenizer, config.model.text_vocab_size)
    return PairSamples(parts[0][0], vocabulary, config.model.seq_length, config.train.seed)


FAMILY = Family(
    "mlm_repro.engine.families.bert.model:BERT", BertForms, _training_order, _validation_order
)
