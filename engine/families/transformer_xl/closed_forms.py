"""Parameters, bytes and floating-point operations of a Transformer-XL in closed form. Imports no torch."""

from engine.model.closed_forms import ClosedForms
from engine.parallel.layout import Stage


class TransformerXLForms(ClosedForms):
    """A Transformer-XL has a memory, which counts as part of its segment where keys and values are made of it."""

    def parameters(self, stage: Stage, tp: int = 1) -> int:
        """Those of its layers, and of the embedding, which is adaptive where there are cutoffs."""
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
        """By content and by distance, of the memory and of the segment."""
        return 7 * (self.model.transformer_xl.memory_length + self.s)

    def head_columns(self) -> float:
        """Of an adaptive softmax the head; a tail counts for nothing."""
        return min((*self.model.transformer_xl.cutoffs, self.v))

    def flops(self, sequences: int, recompute: bool, causal: bool) -> float:
        """Products with weights, scores by content and by distance, values, output head."""
        model, s, h, width = self.model, self.s, self.h, self.model.num_heads * self.model.head_dim
        keys = model.transformer_xl.memory_length + s
        attention = 6 * s * (keys - (s / 2 if causal else 0)) * width
        layer = 2 * h * width * (3 * keys + s) + attention + 4 * s * h * model.inner_size
        head = 2 * s * h * self.head_columns()
        return sequences * ((4 if recompute else 3) * model.num_layers * layer + 3 * head)
