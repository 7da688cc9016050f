"""What the engine asks of a family of models, and the one door to those beside GPT-2. Imports no torch.

Another family is a folder of `engine/families` whose `FAMILY` overrides what is different in it.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.tokens.token_file import TokenFile
from engine.config import ModelConfig, RunConfig
from engine.data.batch_schedule import BatchSchedule
from engine.data.batches import TrainingBatches, TrainingOrder, ValidationBatches, ValidationOrder
from engine.model.closed_forms import ClosedForms

if TYPE_CHECKING:
    from engine.model.stage_model import StageModel

TokenFiles = Sequence[tuple[TokenFile, float]]
"""Token files with their weights."""


class Family:
    """The parts of GPT-2, and what another family overrides."""

    def model_class(self) -> "type[StageModel]":
        """The model, or a pipeline stage of it."""
        from engine.model.gpt2 import GPT2

        return GPT2

    def closed_forms(self, model: ModelConfig) -> ClosedForms:
        """Its parameters, operations and bytes."""
        return ClosedForms(model)

    def training_order(
        self, config: RunConfig, parts: TokenFiles, iterations: int, tokenizer: Path | None
    ) -> TrainingOrder:
        """Which sequences each iteration sees; `tokenizer` is the directory of the token files' own."""
        train = config.train
        schedule = BatchSchedule(train)
        return TrainingBatches(parts, config.model.seq_length, schedule, train.microbatch_size, iterations, train.seed)

    def validation_order(self, config: RunConfig, parts: TokenFiles, tokenizer: Path) -> ValidationOrder:
        """The sequences of the validation split."""
        return ValidationBatches(parts, config.model.seq_length)


@cache
def load_family(name: str) -> Family:
    """The family of a `model.family`."""
    if name == "gpt2":
        return Family()
    family: Family = import_module(f"engine.families.{name.replace('-', '_')}").FAMILY
    return family


def family_of(model: ModelConfig) -> Family:
    """The family of a model."""
    return load_family(model.family)
