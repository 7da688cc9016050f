"""BERT: sentence pairs with masked tokens (2019 paper, Section 5.3). Imports no torch."""

from pathlib import Path

from data_pipeline.tokens.special_tokens import MASKED_SHARE
from engine.config import RunConfig
from engine.data.batch_schedule import BatchSchedule
from engine.data.batches import TrainingOrder, ValidationOrder
from engine.families.bert.batches import PairSource, PairTrainingBatches, PairValidationBatches, read_vocabulary
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


def _training_order(config: RunConfig, parts: TokenFiles, iterations: int, tokenizer: Path | None) -> TrainingOrder:
    pairs, schedule = _pairs(config, parts, tokenizer), BatchSchedule(config.train)
    return PairTrainingBatches(pairs, schedule, config.train.microbatch_size, iterations)


def _validation_order(config: RunConfig, parts: TokenFiles, tokenizer: Path) -> ValidationOrder:
    return PairValidationBatches(_pairs(config, parts, tokenizer))


def _pairs(config: RunConfig, parts: TokenFiles, tokenizer: Path | None) -> PairSource:
    vocabulary = read_vocabulary(tokenizer, config.model.text_vocab_size)
    return PairSource(parts, vocabulary, config.model.seq_length, config.train.seed)


FAMILY = Family("engine.families.bert.model:BERT", BertForms, _training_order, _validation_order)
