"""A family of models: its class, closed forms and data order. Imports no torch.

GPT-2 is defined here. Each other family is a folder of `engine/families` with a `FAMILY`, and has a
section in `engine/config.py`.

Shapes: s sequence, h hidden, L layers, v padded vocabulary, t tensor-parallel ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from mlm_repro.engine.config import ModelConfig, RunConfig
from mlm_repro.engine.parallel.layout import PipelineStage

if TYPE_CHECKING:
    from mlm_repro.data_pipeline.tokens.token_file import TokenFile
    from mlm_repro.engine.data.batches import TrainingOrder, ValidationOrder
    from mlm_repro.engine.model.stage_model import StageModel

TokenFiles = Sequence[tuple["TokenFile", float]]
"""Sequence of pairs (TokenFile, its weight in the blend)."""


class ClosedForms:
    """Formulas for the parameters, FLOPs and bytes of a model configuration, with which
    `engine/costs.py` computes; here GPT-2's. Another family overrides the methods in which it
    differs."""

    is_causal = True

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        self.s = model.seq_length
        self.h = model.hidden_size
        self.v = model.padded_vocab_size

    def parameters(self, stage: PipelineStage, tp: int = 1) -> int:
        """Return the number of parameters of the model that one of `tp` tensor-parallel ranks, by
        default the only one, holds of the pipeline stage `stage`, with its share of the padded
        vocabulary. The last stage has a copy of the word embedding if it is not the first as well.
        The model is this object's."""
        h = self.h
        words = self.v // tp * self.h
        # In a layer 12h² weights and 7h biases are divided over tp. Two layer norms and the two
        # biases that are added after the all-reduces, together 6h, are whole on every rank.
        count = len(stage.layers) * ((12 * h * h + 7 * h) // tp + 6 * h)
        count += words + self.s * h if stage.is_first else 0
        return count + (2 * h + (0 if stage.is_first else words) if stage.is_last else 0)

    def score_bytes(self) -> int:
        """Return the bytes that one query of one head keeps in a layer for the backward pass, in 16
        bits: here 5 for each of the s keys, for the softmax's output, the dropout mask and the
        dropout's output."""
        return 5 * self.s

    def head_columns(self) -> float:
        """Return the number of output columns that the head computes for a position, averaged over
        positions; here the padded vocabulary."""
        return self.v

    def flops(self, sequences: int, recompute: bool, causal: bool) -> float:
        """Return the FLOPs of all matrix products for `sequences` sequences, forward and backward.
        With `recompute` the layers' forward pass counts twice; with `causal` the masked half of
        attention is left out, if the family is causal.

        With B sequences, and attention in full, a GPT-2 has 72·B·s·L·h²·(1 + s/6h + v/12Lh) or,
        with recomputation, the 2021 paper's Equation 3, 96·B·s·L·h²·(1 + s/6h + v/16Lh); a BERT has
        `head_columns()` in place of v.
        """
        s = self.s
        h = self.h
        layers = self.model.num_layers
        # Recomputation repeats the layers' forward pass, a third of 72 more, and not the head's:
        # 72/12 = 96/16.
        factor, share = (96, 16) if recompute else (72, 12)
        # A causal query sees half of the keys on average.
        attention = s / ((12 if causal and self.is_causal else 6) * h)
        return (
            factor
            * sequences
            * s
            * layers
            * h
            * h
            * (1 + attention + self.head_columns() / (share * layers * h))
        )


@dataclass(frozen=True)
class Family:
    """A family of models as the engine uses it: name of its model class, which the method
    `model_class` imports, its class of closed forms, and functions that return the orders of
    training and of validation samples."""

    model: str
    """`module:class` of the model, a StageModel. The class also builds a single pipeline stage."""
    closed_forms: type[ClosedForms]
    training_order: Callable[[RunConfig, TokenFiles, int, Path | None], "TrainingOrder"]
    """Function (run, token files with weights, number of iterations, directory of their tokenizer
    or None) → TrainingOrder, which gives the samples of each iteration."""
    validation_order: Callable[[RunConfig, TokenFiles, Path], "ValidationOrder"]
    """Function (run, token files with weights, directory of their tokenizer) → ValidationOrder,
    which gives the sequences of the validation split in order."""

    def model_class(self) -> "type[StageModel]":
        """Import the module of the family's model, and return its class, a subclass of StageModel.
        It needs torch."""
        # Imported late, because the class needs torch and the closed forms do not.
        module, name = self.model.split(":")
        return getattr(import_module(module), name)


def _training_order(
    config: RunConfig, parts: TokenFiles, iterations: int, tokenizer: Path | None
) -> "TrainingOrder":
    # Imported when samples are asked for, so that a command that needs none starts sooner.
    from mlm_repro.data_pipeline.tokens.samples import training_samples
    from mlm_repro.engine.batch_schedule import BatchSchedule
    from mlm_repro.engine.data.batches import TrainingOrder, text_of

    train = config.train
    schedule = BatchSchedule(config.train)
    samples = training_samples(
        parts, schedule.samples_before(iterations), config.model.seq_length, train.seed
    )
    return TrainingOrder(schedule, train.microbatch_size, text_of(samples.sample))


def _validation_order(config: RunConfig, parts: TokenFiles, tokenizer: Path) -> "ValidationOrder":
    from mlm_repro.engine.data.batches import validation_text

    return validation_text(parts, config.model.seq_length)


GPT2 = Family("mlm_repro.engine.model.gpt2:GPT2", ClosedForms, _training_order, _validation_order)


def family_of(model: ModelConfig) -> Family:
    """Return the Family of a model configuration: GPT-2's, or for another one the `FAMILY` of its
    folder in `engine/families`, which is imported here."""
    if model.family == "gpt2":
        return GPT2
    # By name, because the core knows no family but GPT-2.
    return import_module(f"mlm_repro.engine.families.{model.family.replace('-', '_')}").FAMILY
