"""Transformer-XL: segments read one after the other (Dai et al. 2019). Imports no torch."""

from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import ModelConfig, RunConfig
from engine.data.batch_schedule import BatchSchedule
from engine.data.batches import TrainingOrder, TrainingStreams, ValidationOrder, ValidationStreams
from engine.families.transformer_xl.closed_forms import TransformerXLForms
from engine.family import Family, TokenFiles

if TYPE_CHECKING:
    from engine.families.transformer_xl.model import TransformerXL


class TransformerXLFamily(Family):
    """The parts of a Transformer-XL."""

    def model_class(self) -> "type[TransformerXL]":
        """The model, or a pipeline stage of it."""
        from engine.families.transformer_xl.model import TransformerXL

        return TransformerXL

    def closed_forms(self, model: ModelConfig) -> TransformerXLForms:
        """Its parameters, operations and bytes."""
        return TransformerXLForms(model)

    def training_order(
        self, config: RunConfig, parts: TokenFiles, iterations: int, tokenizer: Path | None
    ) -> TrainingOrder:
        """Which segments each iteration sees."""
        train = config.train
        schedule = BatchSchedule(train)
        return TrainingStreams(
            parts[0][0], config.model.seq_length, schedule, train.microbatch_size, iterations, train.seed
        )

    def validation_order(self, config: RunConfig, parts: TokenFiles, tokenizer: Path) -> ValidationOrder:
        """The segments of the validation split."""
        train = config.train
        return ValidationStreams(parts[0][0], config.model.seq_length, train.global_batch_size, train.microbatch_size)


FAMILY = TransformerXLFamily()
