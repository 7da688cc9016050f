"""Transformer-XL: segments read one after the other (Dai et al. 2019). Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from mlm_repro.data_pipeline.tokens.samples import PackedSamples
from mlm_repro.engine.batch_schedule import BatchSchedule
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.data.batches import (
    Microbatch,
    TrainingOrder,
    ValidationOrder,
    place_groups,
    text_of,
)
from mlm_repro.engine.family import ClosedForms, Family, TokenFiles
from mlm_repro.engine.parallel.layout import PipelineStage
from mlm_repro.lineage.errors import BadInput


class TransformerXLForms(ClosedForms):
    """Formulas for the parameters, FLOPs and bytes of a Transformer-XL. Keys and values are
    computed for the memory as well as for the segment."""

    def parameters(self, stage: PipelineStage, tp: int = 1) -> int:
        """Return the number of parameters that one of `tp` tensor-parallel ranks holds of a
        pipeline stage: its layers and, on the first and the last stage, the embedding. An adaptive
        embedding, which cutoffs make, is whole on every rank."""
        model = self.model
        h = self.h
        xl = self.model.transformer_xl
        width = model.num_heads * model.head_dim
        inner = model.inner_size
        count = len(stage.layers) * (
            (5 * h * width + 2 * width + 2 * h * inner + inner) // tp + 5 * h
        )
        if not (stage.is_first or stage.is_last):
            return count
        if not xl.cutoffs:
            return count + self.v // tp * h
        bounds = (0, *xl.cutoffs, model.vocab_size)
        widths = [h // xl.div_value**cluster for cluster in range(len(bounds) - 1)]
        words = sum(
            (high - low) * w for low, high, w in zip(bounds, bounds[1:], widths, strict=False)
        )
        return count + words + h * sum(widths[1:]) + len(xl.cutoffs) * h

    def score_bytes(self) -> int:
        """Return the bytes that one query of one head keeps in a layer for the backward pass, in 16
        bits: 7 for each key, for its scores by content and by distance. This model's memory length
        and its sequence length together are the number of keys."""
        return 7 * (self.model.transformer_xl.memory_length + self.s)

    def head_columns(self) -> float:
        """Return the number of columns of the output head, the padded vocabulary. An adaptive
        softmax counts the words below its first cutoff alone; its tails are neglected."""
        return min((*self.model.transformer_xl.cutoffs, self.v))

    def flops(self, sequences: int, recompute: bool, causal: bool) -> float:
        """Return the FLOPs of `sequences` sequences, forward and backward: products with weights,
        scores by content and by distance, products with values, and the output head, of which an
        adaptive softmax counts the words below its first cutoff alone. With `recompute` the layers'
        forward pass counts twice; with `causal` the masked half of a segment's own keys is left
        out."""
        model = self.model
        s = self.s
        h = self.h
        width = self.model.num_heads * self.model.head_dim
        keys = model.transformer_xl.memory_length + s
        attention = 6 * s * (keys - (s / 2 if causal else 0)) * width
        layer = 2 * h * width * (3 * keys + s) + attention + 4 * s * h * model.inner_size
        head = 2 * s * h * self.head_columns()
        return sequences * ((4 if recompute else 3) * model.num_layers * layer + 3 * head)


@dataclass(frozen=True)
class TrainingStreams(TrainingOrder):
    """Order in which a Transformer-XL with memory reads training sequences: each row of the global
    batch goes on in the text where the row's previous sequence stopped.

    The documents, shuffled as for other models, form one line of tokens, cut into streams of
    `iterations` sequences, the number of the training's iterations. Row p reads stream p, so the
    method `number` returns p · `iterations` + i for it in iteration i, both counted from 0. A row
    that a growing batch adds later begins as far into its stream as the other rows are.
    """

    iterations: int

    def number(self, iteration: int, place: int) -> int:
        return place * self.iterations + iteration


@dataclass(frozen=True)
class ValidationStreams(ValidationOrder):
    """Order in which a model with a memory of earlier segments reads validation sequences: each of
    the `global_batch_size` rows of the batch reads its own stream from end to end, an equal,
    consecutive share of the sequences that this validation takes. The method `microbatches` yields
    a rank's microbatches."""

    are_streams: ClassVar = True
    global_batch_size: int
    microbatch_size: int

    def microbatches(
        self, num_samples: int, batch_size: int, dp_rank: int, dp: int
    ) -> Iterator[Microbatch]:
        """Yield the Microbatches of data-parallel rank `dp_rank` of `dp`, with training's
        microbatch size whatever `batch_size` is: all of one group of streams, in the order of the
        text, then all of the next group.

        The ranks together read the first `num_samples` sequences of the split, rounded down to
        whole global batches, but at least one batch and no more than the split has. Each stream is
        an equal, consecutive share of these.
        """
        rows = max(min(num_samples, self.num_samples) // self.global_batch_size, 1)
        for places in place_groups(self.global_batch_size, self.microbatch_size, dp_rank, dp):
            for row in range(rows):
                yield self.take([place * rows + row for place in places], places)


def training_streams(
    config: RunConfig, parts: TokenFiles, iterations: int, _: Path | None
) -> TrainingStreams:
    """Return a TrainingStreams, the order in which `iterations` iterations of training by `config`,
    which gives batch sizes, sequence length and seed, read text as streams, one for each sequence
    of the largest global batch. Only the first of `parts`, pairs (token file, weight), is read. The
    last argument, a tokenizer's directory, is not used. Raises BadInput if the file is shorter than
    one sample, a sequence and one token."""
    train = config.train
    schedule = BatchSchedule(config.train)
    count = iterations * schedule.batch_size(iterations - 1)
    samples = PackedSamples(parts[0][0], count, config.model.seq_length, train.seed)
    return TrainingStreams(
        schedule, train.microbatch_size, text_of(samples.consecutive), iterations
    )


def validation_streams(config: RunConfig, parts: TokenFiles, _: Path) -> ValidationStreams:
    """Return a ValidationStreams, the order in which validation reads text as streams, one for each
    sequence of a global batch. Only the first file of `parts`, (token file, weight), is read. The
    last argument, a tokenizer's directory, is not used. Raises BadInput if the file is too short
    for one sequence per stream."""
    file = parts[0][0]
    s = config.model.seq_length
    streams = config.train.global_batch_size
    sequences = (len(file.tokens) - 1) // s // streams * streams
    if not sequences:
        raise BadInput(
            f"the first token file of the dataset's validation split has {len(file.tokens)} tokens,"
            f" and a transformer-xl needs {streams} × {s} + 1, a sequence of model.seq_length for"
            " each of train.global_batch_size streams: make the split larger, or one of these"
            " smaller"
        )
    sequence = text_of(
        lambda number: file.tokens[number * s : (number + 1) * s + 1].astype(np.int64)
    )
    return ValidationStreams(sequences, sequence, streams, config.train.microbatch_size)


MODEL = "mlm_repro.engine.families.transformer_xl.model:TransformerXL"
FAMILY = Family(MODEL, TransformerXLForms, training_streams, validation_streams)
