"""Parameters and floating-point operations of a BERT in closed form. Imports no torch."""

from data_pipeline.tokens.special_tokens import MASKED_SHARE
from engine.model.closed_forms import ClosedForms
from engine.parallel.layout import Stage


class BertForms(ClosedForms):
    """A BERT also has segments, and behind its layers a masked head, a pooler and sentence order."""

    is_causal = False

    def parameters(self, stage: Stage, tp: int = 1) -> int:
        """Those of a GPT-2 and of segments; of dense, norm and bias of the head; of pooler and sentence order."""
        h = self.h
        head = (h * h + 3 * h + self.v // tp) + (h * h + h) + (2 * h + 2)
        return super().parameters(stage, tp) + stage.is_first * 2 * h + stage.is_last * head

    def head_columns(self) -> float:
        """The dense product of every token, then logits of the masked ones alone."""
        return self.v * MASKED_SHARE + self.h
