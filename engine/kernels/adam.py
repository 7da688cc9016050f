"""Adam's update over flat storage, for AdamW and for LAMB (Kingma & Ba 2015; Loshchilov & Hutter
2019)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.adamw import adamw as torchs_adamw

CACHED = 1 << 16
"""Number of elements of the flat storage that a CPU updates at a time, few enough to stay in its
cache."""
VECTOR = 64
"""Number of elements that is a multiple of every processor's vector length; the end of a flat
tensor is padded to it."""


@dataclass(frozen=True)
class AdamStep:
    """Hyper-parameters and clipping factor of one Adam update, and the number of updates so far,
    this one included."""

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    clipping: float
    """Factor that the gradient is multiplied by before it is used."""
    steps: int
    """Number of updates so far, including this one."""


def adamw(
    weights: Tensor,
    copy: Tensor | None,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: AdamStep,
) -> None:
    """Update `weights` and the moments `exp_avg` and `exp_avg_sq`, flat tensors of one length, in
    place with torch's fused AdamW. `step` has the learning rate, the betas and the other numbers of
    the step. `copy`, unless None, receives the new weights in its own dtype; nothing is returned.

    The gradient is multiplied by the clipping factor in place, because a copy would be as large as
    the model.
    """
    if step.clipping != 1.0:
        gradient.mul_(step.clipping)
    tensors = (weights, gradient, exp_avg, exp_avg_sq)
    # The last elements are padded: torch rounds a remainder that fills no vector otherwise, and a
    # weight's update must not depend on its index.
    whole = len(weights) // VECTOR * VECTOR
    ends = [F.pad(tensor[whole:], (0, VECTOR - len(tensor) + whole)) for tensor in tensors]
    # One less, because torch counts the update itself.
    count = torch.full((), step.steps - 1, dtype=torch.float32, device=weights.device)
    given = [[tensor[:whole], end] for tensor, end in zip(tensors, ends, strict=True)]
    torchs_adamw(
        given[0],
        given[1],
        given[2],
        given[3],
        [],
        [count, count.clone()],
        fused=True,
        amsgrad=False,
        beta1=step.beta1,
        beta2=step.beta2,
        lr=step.learning_rate,
        weight_decay=step.weight_decay,
        eps=step.epsilon,
        maximize=False,
    )
    for tensor, end in zip(tensors, ends, strict=True):
        tensor[whole:] = end[: len(tensor) - whole]
    if copy is not None:
        copy.copy_(weights)


def adam_direction(
    weights: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: AdamStep,
    is_corrected: bool,
) -> Tensor:
    """Update the moments m, `exp_avg`, and v, `exp_avg_sq`, and multiply the gradient by the
    clipping factor, all in place, and return the direction of a step, m/(√v + ε) + λ·weights, as a
    new flat tensor, with the bias of m and v corrected if `is_corrected`. `step` has the betas, ε,
    λ, the clipping factor and the number of updates; its rate is not used. The weights do not
    change."""
    first, second = (
        1 - beta**step.steps if is_corrected else 1.0 for beta in (step.beta1, step.beta2)
    )
    direction = torch.empty_like(weights)
    tensors = (weights, gradient, exp_avg, exp_avg_sq, direction)
    # A GPU takes everything at once. At least 1, because an owner may have no element, and a split
    # by 0 fails.
    at_once = CACHED if weights.device.type == "cpu" else max(len(weights), 1)
    for w, g, m, v, out in zip(*(tensor.split(at_once) for tensor in tensors), strict=True):
        g.mul_(step.clipping)
        m.lerp_(g, 1 - step.beta1)
        v.mul_(step.beta2).addcmul_(g, g, value=1 - step.beta2)
        torch.div(v, second, out=out).sqrt_().add_(step.epsilon)
        torch.div(m / first, out, out=out).add_(w, alpha=step.weight_decay)
    return direction
