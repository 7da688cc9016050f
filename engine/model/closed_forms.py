"""Parameters, floating-point operations and bytes of a model in closed form. Imports no torch.

Shapes: s sequence, h hidden, L layers, v padded vocabulary, t tensor-parallel ranks.
"""

from engine.config import ModelConfig
from engine.parallel.layout import Stage


class ClosedForms:
    """Closed forms of a GPT-2. Another family overrides what is different in it."""

    is_causal = True

    def __init__(self, model: ModelConfig) -> None:
        self.model, self.s, self.h, self.v = model, model.seq_length, model.hidden_size, model.padded_vocab_size

    def parameters(self, stage: Stage, tp: int = 1) -> int:
        """Numbers that a tensor-parallel rank of a stage holds. The last stage has a copy of the word embedding."""
        h, words = self.h, self.v // tp * self.h
        count = len(stage.layers) * ((12 * h * h + 7 * h) // tp + 6 * h)
        count += words + self.s * h if stage.is_first else 0
        return count + (2 * h + (0 if stage.is_first else words) if stage.is_last else 0)

    def score_bytes(self) -> int:
        """Kept of a query's scores, at 2 bytes per element: output of the softmax, mask and output of the dropout."""
        return 5 * self.s

    def head_columns(self) -> float:
        """Columns of the output head that a position is multiplied with."""
        return self.v

    def flops(self, sequences: int, recompute: bool, causal: bool) -> float:
        """Of the matrix products of so many sequences, forward and backward, as `flops_per_token` explains.

        72·B·s·L·h²·(1 + s/6h + v/12Lh), or the 2021 paper's Equation 3, 96·B·s·L·h²·(1 + s/6h + v/16Lh).
        """
        s, h, layers = self.s, self.h, self.model.num_layers
        factor, share = (96, 16) if recompute else (72, 12)
        attention = s / ((12 if causal and self.is_causal else 6) * h)
        return factor * sequences * s * layers * h * h * (1 + attention + self.head_columns() / (share * layers * h))
