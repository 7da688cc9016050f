"""Adam's update over flat storage, alone and as LAMB takes it (Kingma & Ba 2015; Loshchilov & Hutter 2019)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim.adamw import adamw

from engine.compiled import Array, Compiled, array, store

TOGETHER = 1024
"""Elements that are moved on while they lie in the cache."""


@dataclass(frozen=True)
class AdamStep:
    """The numbers of one update."""

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    clipping: float
    """What the gradient is multiplied with first."""
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
    """One step of torch's fused AdamW on flat weights and moments; `copy` has the new weights in its own format.

    The gradient is clipped in place, here and in `reference_direction`: a copy would be as large as the model.
    """
    count = torch.full((), step.steps - 1, dtype=torch.float32, device=weights.device)
    adamw(
        [weights], [gradient.mul_(step.clipping)], [exp_avg], [exp_avg_sq], [], [count], fused=True, amsgrad=False,
        beta1=step.beta1, beta2=step.beta2, lr=step.learning_rate, weight_decay=step.weight_decay, eps=step.epsilon,
        maximize=False,
    )  # fmt: skip
    if copy is not None:
        copy.copy_(weights)


def reference_direction(
    weights: torch.Tensor, gradient: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, step: AdamStep,
    is_corrected: bool,
) -> torch.Tensor:  # fmt: skip
    """m/(√v + ε) + λ·weights, the moments moved on and, if so, corrected for their start; weights are not changed."""
    gradient.mul_(step.clipping)
    exp_avg.lerp_(gradient, 1 - step.beta1)
    exp_avg_sq.mul_(step.beta2).addcmul_(gradient, gradient, value=1 - step.beta2)
    first, second = step.corrections if is_corrected else (1.0, 1.0)
    root = (exp_avg_sq / second).sqrt_().add_(step.epsilon)
    return (exp_avg / first).div_(root).add_(weights, alpha=step.weight_decay)


def compiled(
    weights: torch.Tensor, copy: torch.Tensor | None, gradient: torch.Tensor, exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor, step: AdamStep,
) -> None:  # fmt: skip
    """One step of AdamW on flat fp32 weights and moments in one pass; `copy` has the new weights in its own format."""
    is_bf16 = copy is not None and copy.dtype == torch.bfloat16
    moments = array(gradient), array(exp_avg), array(exp_avg_sq)
    out = array(copy) if copy is not None and is_bf16 else np.empty(0, dtype=np.float32)
    _adam(array(weights), out, *moments, *_numbers(step, step.corrections), False)
    if copy is not None and not is_bf16:
        copy.copy_(weights)


def compiled_direction(
    weights: torch.Tensor, gradient: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, step: AdamStep,
    is_corrected: bool,
) -> torch.Tensor:  # fmt: skip
    """m/(√v + ε) + λ·weights, the moments moved on and, if so, corrected for their start; weights are not changed."""
    direction = torch.empty_like(weights)
    numbers = _numbers(step, step.corrections if is_corrected else (1.0, 1.0))
    _adam(array(weights), array(direction), array(gradient), array(exp_avg), array(exp_avg_sq), *numbers, True)
    return direction


def _numbers(step: AdamStep, corrections: tuple[float, float]) -> tuple[Any, ...]:
    first, second = corrections
    numbers = (
        step.clipping, step.learning_rate, step.weight_decay, 1 - step.beta1, step.beta2, 1 - step.beta2, 1 / first,
        1 / second, step.epsilon,
    )  # fmt: skip
    return tuple(np.float32(number) for number in numbers)


@Compiled
def _adam(
    weights: Array, out: Array, gradient: Array, exp_avg: Array, exp_avg_sq: Array, clipping: np.float32,
    rate: np.float32, decay: np.float32, beta1_left: np.float32, beta2: np.float32, beta2_left: np.float32,
    first: np.float32, second: np.float32, epsilon: np.float32, is_direction: bool,
) -> None:  # fmt: skip
    """`out` takes the direction, or, unless it is empty, a copy of the new weights."""
    change = np.empty(TOGETHER, dtype=np.float32)
    for start in range(0, weights.size, TOGETHER):
        end = min(start + TOGETHER, weights.size)
        w, g, m, v = weights[start:end], gradient[start:end], exp_avg[start:end], exp_avg_sq[start:end]
        for i in range(w.size):
            given = g[i] * clipping
            m[i] += (given - m[i]) * beta1_left
            v[i] = v[i] * beta2 + given * given * beta2_left
            change[i] = (m[i] * first) / (np.sqrt(v[i] * second) + epsilon)
        if is_direction:
            part = out[start:end]
            for i in range(w.size):
                store(part, i, change[i] + w[i] * decay)
        else:
            for i in range(w.size):
                w[i] -= rate * (change[i] + w[i] * decay)
            if out.size > 0:
                copied = out[start:end]
                for i in range(w.size):
                    store(copied, i, w[i])
