"""Transformer-XL: segments read one after the other (Dai et al. 2019). Imports no torch."""

from pathlib import Path

from engine.config import RunConfig
from engine.data.batch_schedule import BatchSchedule
from engine.data.batches import TrainingOrder, TrainingStreams, ValidationOrder, ValidationStreams
from engine.family import ClosedForms, Family, TokenFiles
from engine.parallel.layout import PipelineStage


class TransformerXLForms(ClosedForms):
    """Closed forms of Transformer-XL. Keys and values are computed for the memory as well as for the segment."""

    def parameters(self, stage: PipelineStage, tp: int = 1) -> int:
        """Parameters of the layers and of the embedding, which is adaptive if there are cutoffs."""
        model, h, xl = self.model, self.h, self.model.transformer_xl
        width, inner = model.num_heads * model.head_dim, model.inner_size
        count = len(stage.layers) * ((5 * h * width + 2 * width + 2 * h * inner + inner) // tp + 5 * h)
        if not (stage.is_first or stage.is_last):
            return count
        if not xl.cutoffs:
            return count + self.v // tp * h
        bounds = (0, *xl.cutoffs, model.vocab_size)
        widths = [h // xl.div_value**cluster for cluster in range(len(bounds) - 1)]
        words = sum((high - low) * w for low, high, w in zip(bounds, bounds[1:], widths, strict=False))
        return count + words + h * sum(widths[1:]) + len(xl.cutoffs) * h

    def score_bytes(self) -> int:
        """Scores by content and by distance, over memory and segment."""
        return 7 * (self.model.transformer_xl.memory_length + self.s)

    def head_columns(self) -> float:
        """Columns of the head of an adaptive softmax. Its tails are neglected."""
        return min((*self.model.transformer_xl.cutoffs, self.v))

    def flops(self, sequences: int, recompute: bool, causal: bool) -> float:
        """Products with weights, scores by content and by distance, values, output head."""
        model, s, h, width = self.model, self.s, self.h, self.model.num_heads * self.model.head_dim
        keys = model.transformer_xl.memory_length + s
        attention = 6 * s * (keys - (s / 2 if causal else 0)) * width
        layer = 2 * h * width * (3 * keys + s) + attention + 4 * s * h * model.inner_size
        head = 2 * s * h * self.head_columns()
        return sequences * ((4 if recompute else 3) * model.num_layers * layer + 3 * head)


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
