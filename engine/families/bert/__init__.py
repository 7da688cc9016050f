"""BERT: sentence pairs with masked tokens (2019 paper, Section 5.3). Imports no torch."""

from pathlib import Path

from engine.config import RunConfig
from engine.data.batch_schedule import BatchSchedule
from engine.data.batches import TrainingOrder, ValidationOrder
from engine.families.bert.batches import PairSource, PairTrainingBatches, PairValidationBatches, read_vocabulary
from engine.families.bert.closed_forms import BertForms
from engine.family import Family, TokenFiles


def _training_order(config: RunConfig, parts: TokenFiles, iterations: int, tokenizer: Path | None) -> TrainingOrder:
    pairs, schedule = _pairs(config, parts, tokenizer), BatchSchedule(config.train)
    return PairTrainingBatches(pairs, schedule, config.train.microbatch_size, iterations)


def _validation_order(config: RunConfig, parts: TokenFiles, tokenizer: Path) -> ValidationOrder:
    return PairValidationBatches(_pairs(config, parts, tokenizer))


def _pairs(config: RunConfig, parts: TokenFiles, tokenizer: Path | None) -> PairSource:
    vocabulary = read_vocabulary(tokenizer, config.model.text_vocab_size)
    return PairSource(parts, vocabulary, config.model.seq_length, config.train.seed)


FAMILY = Family("engine.families.bert.model:BERT", BertForms, _training_order, _validation_order)
