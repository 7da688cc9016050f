"""What the engine asks of a family of models, and the one door to those beside GPT-2. Imports no torch.

Another family is a folder of `engine/families` with a `FAMILY` of its own, and its section in `engine/config.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import ModelConfig, RunConfig
from engine.model.closed_forms import ClosedForms

if TYPE_CHECKING:
    from data_pipeline.tokens.token_file import TokenFile
    from engine.data.batches import TrainingOrder, ValidationOrder
    from engine.model.stage_model import StageModel

TokenFiles = Sequence[tuple["TokenFile", float]]
"""Token files with their weights."""


@dataclass(frozen=True)
class Family:
    """The parts of a family."""

    model: str
    """module:class of the model, or a pipeline stage of it."""
    closed_forms: type[ClosedForms]
    """Its parameters, operations and bytes."""
    training_order: Callable[[RunConfig, TokenFiles, int, Path | None], "TrainingOrder"]
    """(run, token files, iterations, directory of the token files' own tokenizer) → what each iteration sees."""
    validation_order: Callable[[RunConfig, TokenFiles, Path], "ValidationOrder"]
    """(run, token files, tokenizer) → the sequences of the validation split."""

    def model_class(self) -> "type[StageModel]":
        """The model's class, imported at the first use, as it needs torch."""
        module, name = self.model.split(":")
        loaded: type[StageModel] = getattr(import_module(module), name)
        return loaded


def _training_order(config: RunConfig, parts: TokenFiles, iterations: int, tokenizer: Path | None) -> "TrainingOrder":
    from engine.data.batch_schedule import BatchSchedule
    from engine.data.batches import TrainingBatches

    train, schedule = config.train, BatchSchedule(config.train)
    return TrainingBatches(parts, config.model.seq_length, schedule, train.microbatch_size, iterations, train.seed)


def _validation_order(config: RunConfig, parts: TokenFiles, tokenizer: Path) -> "ValidationOrder":
    from engine.data.batches import ValidationBatches

    return ValidationBatches(parts, config.model.seq_length)


GPT2 = Family("engine.model.gpt2:GPT2", ClosedForms, _training_order, _validation_order)


def family_of(model: ModelConfig) -> Family:
    """The family of a model."""
    if model.family == "gpt2":
        return GPT2
    family: Family = import_module(f"engine.families.{model.family.replace('-', '_')}").FAMILY
    return family
