"""BERT: sentence pairs with masked tokens (2019 paper, Section 5.3). Imports no torch."""

from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import ModelConfig, RunConfig
from engine.data.batch_schedule import BatchSchedule
from engine.data.batches import TrainingOrder, ValidationOrder
from engine.families.bert.batches import PairSource, PairTrainingBatches, PairValidationBatches, read_vocabulary
from engine.families.bert.closed_forms import BertForms
from engine.family import Family, TokenFiles

if TYPE_CHECKING:
    from engine.families.bert.model import BERT


class Bert(Family):
    """The parts of a BERT."""

    def model_class(self) -> "type[BERT]":
        """The model, or a pipeline stage of it."""
        from engine.families.bert.model import BERT

        return BERT

    def closed_forms(self, model: ModelConfig) -> BertForms:
        """Its parameters, operations and bytes."""
        return BertForms(model)

    def training_order(
        self, config: RunConfig, parts: TokenFiles, iterations: int, tokenizer: Path | None
    ) -> TrainingOrder:
        """Which pairs each iteration sees."""
        train = config.train
        schedule = BatchSchedule(train)
        return PairTrainingBatches(_pairs(config, parts, tokenizer), schedule, train.microbatch_size, iterations)

    def validation_order(self, config: RunConfig, parts: TokenFiles, tokenizer: Path) -> ValidationOrder:
        """The pairs of the validation split."""
        return PairValidationBatches(_pairs(config, parts, tokenizer))


def _pairs(config: RunConfig, parts: TokenFiles, tokenizer: Path | None) -> PairSource:
    vocabulary = read_vocabulary(tokenizer, config.model.text_vocab_size)
    return PairSource(parts, vocabulary, config.model.seq_length, config.train.seed)


FAMILY = Bert()
