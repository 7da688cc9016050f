"""Transformer-XL: segments read one after the other (Dai et al. 2019). Imports no torch."""

from pathlib import Path

from engine.config import RunConfig
from engine.data.batch_schedule import BatchSchedule
from engine.data.batches import TrainingOrder, TrainingStreams, ValidationOrder, ValidationStreams
from engine.families.transformer_xl.closed_forms import TransformerXLForms
from engine.family import Family, TokenFiles


def _training_order(config: RunConfig, parts: TokenFiles, iterations: int, tokenizer: Path | None) -> TrainingOrder:
    train, (file, _) = config.train, parts[0]
    schedule = BatchSchedule(train)
    return TrainingStreams(file, config.model.seq_length, schedule, train.microbatch_size, iterations, train.seed)


def _validation_order(config: RunConfig, parts: TokenFiles, tokenizer: Path) -> ValidationOrder:
    train, (file, _) = config.train, parts[0]
    return ValidationStreams(file, config.model.seq_length, train.global_batch_size, train.microbatch_size)


FAMILY = Family(
    "engine.families.transformer_xl.model:TransformerXL", TransformerXLForms, _training_order, _validation_order
)
