"""How a token is drawn from a model's distribution. Imports no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lineage.errors import BadInput

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sampling:
    """Steps, in order, by which a token is drawn from the model's distribution. Raises BadInput for a value that leaves
    no distribution."""

    temperature: float = 1.0
    """Divides the logits."""
    top_k: int | None = None
    """Keep only the k likeliest tokens and those as likely as the last of them."""
    top_p: float | None = None
    """Keep only the likeliest tokens that together have this probability (nucleus sampling, Holtzman et al. 2020)."""
    seed: int = 1234

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise BadInput(f"a temperature of {self.temperature} is not above 0 and finite; without one it is greedy")
        if self.top_k is not None and self.top_k < 1:
            raise BadInput(f"top-k = {self.top_k} leaves no token")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise BadInput(f"top-p = {self.top_p} is not in (0, 1]")

    def probabilities(self, logits: "torch.Tensor") -> "torch.Tensor":
        """Probability of each token, [v], from its logits."""
        logits = logits / self.temperature
        if self.top_k is not None:
            smallest = logits.topk(min(self.top_k, len(logits))).values[-1]
            logits = logits.masked_fill(logits < smallest, float("-inf"))
        if self.top_p is not None and self.top_p < 1:
            ascending, order = logits.sort()
            is_out = ascending.softmax(0).cumsum(0) <= 1 - self.top_p
            is_out[-1] = False
            logits = logits.masked_fill(is_out.clone().scatter_(0, order, is_out), float("-inf"))
        return logits.softmax(0)
