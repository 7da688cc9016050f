"""AdamW's update over flat storage in one Triton pass: 30 bytes a weight with a copy in 16 bits, 28
without.

torch's fused AdamW, which clips by `grad_scale`, moves 38: it writes the gradient back, and the
copy is a pass of its own.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from mlm_repro.engine.kernels.adam import AdamStep

BLOCK = 1024
"""Number of weights that a program of the kernel updates."""


def fused(
    weights: Tensor,
    copy: Tensor | None,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: AdamStep,
) -> None:
    """Do one AdamW step on `weights` and the moments `exp_avg` and `exp_avg_sq`, flat tensors of
    one length on a GPU, in place. Unless `copy` is None, write the new weights there too, in the
    dtype of `copy`. `step` has the rate, the betas and the other numbers of the step. The gradient,
    which counts times `step.clipping`, is not changed."""
    # √(v/c) + ε is (√v + ε√c)/√c, which leaves one division for each weight.
    root = math.sqrt(1 - step.beta2**step.steps)
    rate = step.learning_rate * root / (1 - step.beta1**step.steps)
    _adamw[triton.cdiv(len(weights), BLOCK),](
        weights,
        copy,
        gradient,
        exp_avg,
        exp_avg_sq,
        len(weights),
        step.clipping,
        1 - step.beta1,
        step.beta2,
        1 - step.beta2,
        rate,
        step.epsilon * root,
        step.learning_rate * step.weight_decay,
        BLOCK,
    )


@triton.jit
def _adamw(
    weights,
    copy,
    gradient,
    exp_avg,
    exp_avg_sq,
    count,
    clipping,
    share,
    beta2,
    share_sq,
    rate,
    epsilon,
    decay,
    c: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * c + tl.arange(0, c)
    inside = at < count
    # The division that the reducer left and the clipping are one factor, so the gradient is only
    # read.
    slope = tl.load(gradient + at, inside, 0.0).to(tl.float32) * clipping
    mean = tl.load(exp_avg + at, inside, 0.0).to(tl.float32)
    mean += (slope - mean) * share
    square = tl.load(exp_avg_sq + at, inside, 0.0).to(tl.float32) * beta2 + slope * slope * share_sq
    value = tl.load(weights + at, inside, 0.0).to(tl.float32)
    # Not value · (1 − decay): that factor has room for few digits of a small decay.
    value -= value * decay + rate * tl.div_rn(mean, tl.sqrt_rn(square) + epsilon)
    tl.store(exp_avg + at, mean, inside)
    tl.store(exp_avg_sq + at, square, inside)
    tl.store(weights + at, value, inside)
    if copy is not None:
        tl.store(copy + at, value, inside)
