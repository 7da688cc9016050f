"""AdamW's update in one Triton pass over flat storage: 30 bytes a parameter in mixed precision, 28 in fp32."""

import math

import torch
import triton
import triton.language as tl

from mlm_repro.engine.kernels.adam import AdamStep

BLOCK = 1024
"""Parameters of a program."""


def fused(
    weights: torch.Tensor, copy: torch.Tensor | None, gradient: torch.Tensor, exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor, step: AdamStep,
) -> None:  # fmt: skip
    """Update flat weights and moments in fp32, and `copy` in its own dtype; the gradient stays as it is."""
    first, second = (1 - beta**step.steps for beta in (step.beta1, step.beta2))
    _adamw[(triton.cdiv(len(weights), BLOCK),)](
        weights, weights if copy is None else copy, gradient, exp_avg, exp_avg_sq, len(weights), float(step.clipping),
        1 - step.learning_rate * step.weight_decay, step.learning_rate / first, 1 - step.beta1, step.beta2,
        1 - step.beta2, math.sqrt(second), step.epsilon, BLOCK,
    )  # fmt: skip


@triton.jit
def _adamw(
    weights, copy, gradient, exp_avg, exp_avg_sq, count, factor, kept, rate, share, beta2, share_sq, root, epsilon,
    c: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * c + tl.arange(0, c)
    inside = at < count
    g = tl.load(gradient + at, inside, 0.0) * factor
    m = tl.load(exp_avg + at, inside, 0.0)
    m += (g - m) * share
    v = tl.load(exp_avg_sq + at, inside, 0.0) * beta2 + g * g * share_sq
    change = tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + epsilon)
    value = tl.load(weights + at, inside, 0.0) * kept - rate * change
    tl.store(exp_avg + at, m, inside)
    tl.store(exp_avg_sq + at, v, inside)
    tl.store(weights + at, value, inside)
    tl.store(copy + at, value, inside)
