"""Adam's update over flat storage, alone and as LAMB takes it (Kingma & Ba 2015; Loshchilov & Hutter 2019)."""

from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw


@dataclass(frozen=True)
class AdamStep:
    """The numbers of one update."""

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    steps: int
    """Updates so far, this one included."""

    @property
    def corrections(self) -> tuple[float, float]:
        """What the moments are divided by for their start at zero."""
        return 1 - self.beta1**self.steps, 1 - self.beta2**self.steps


def reference(
    weights: torch.Tensor, copy: torch.Tensor | None, gradient: torch.Tensor, exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor, step: AdamStep,
) -> None:  # fmt: skip
    """One step of torch's fused AdamW on flat weights and moments; `copy` has the new weights in its own format."""
    count = torch.full((), step.steps - 1, dtype=torch.float32, device=weights.device)
    adamw(
        [weights], [gradient], [exp_avg], [exp_avg_sq], [], [count], fused=True, amsgrad=False, beta1=step.beta1,
        beta2=step.beta2, lr=step.learning_rate, weight_decay=step.weight_decay, eps=step.epsilon, maximize=False,
    )  # fmt: skip
    if copy is not None:
        copy.copy_(weights)


def reference_direction(
    weights: torch.Tensor, gradient: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, step: AdamStep,
    is_corrected: bool,
) -> torch.Tensor:  # fmt: skip
    """m/(√v + ε) + λ·weights, the moments moved on and, if so, corrected for their start; weights are not changed."""
    exp_avg.lerp_(gradient, 1 - step.beta1)
    exp_avg_sq.mul_(step.beta2).addcmul_(gradient, gradient, value=1 - step.beta2)
    first, second = step.corrections if is_corrected else (1.0, 1.0)
    root = (exp_avg_sq / second).sqrt_().add_(step.epsilon)
    return (exp_avg / first).div_(root).add_(weights, alpha=step.weight_decay)
