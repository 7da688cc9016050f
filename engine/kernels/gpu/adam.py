"""Adam's update over flat storage in one Triton pass, which also writes the model's weights in their own dtype."""

import torch
import triton
import triton.language as tl

from engine.kernels.adam import AdamStep

ELEMENTS = 1024


def fused(
    weights: torch.Tensor, copy: torch.Tensor | None, gradient: torch.Tensor, exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor, step: AdamStep,
) -> None:  # fmt: skip
    """Update flat fp32 weights and moments by AdamW. `copy` receives the new weights in its own dtype."""
    out = weights if copy is None else copy
    _launch(weights, out, gradient, exp_avg, exp_avg_sq, step, step.corrections, copy is not None, False)


def fused_direction(
    weights: torch.Tensor, gradient: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, step: AdamStep,
    is_corrected: bool,
) -> torch.Tensor:  # fmt: skip
    """Update the moments and return m/(√v + ε) + λ·weights. The weights do not change."""
    direction = torch.empty_like(weights)
    corrections = step.corrections if is_corrected else (1.0, 1.0)
    _launch(weights, direction, gradient, exp_avg, exp_avg_sq, step, corrections, False, True)
    return direction


def _launch(
    weights: torch.Tensor, out: torch.Tensor, gradient: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor,
    step: AdamStep, corrections: tuple[float, float], has_copy: bool, is_direction: bool,
) -> None:  # fmt: skip
    """Launch the kernel on contiguous flat tensors."""
    _adam[(triton.cdiv(len(weights), ELEMENTS),)](
        weights, out, gradient, exp_avg, exp_avg_sq, len(weights), step.clipping, step.learning_rate, step.weight_decay,
        1 - step.beta1, step.beta2, 1 - step.beta2, *corrections, step.epsilon, has_copy, is_direction, ELEMENTS,
    )  # fmt: skip


@triton.jit
def _adam(
    weights, out, gradient, exp_avg, exp_avg_sq, n, clipping, rate, decay, beta1_left, beta2, beta2_left, first, second,
    epsilon, has_copy: tl.constexpr, is_direction: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * c + tl.arange(0, c)
    inside = at < n
    weight, given = tl.load(weights + at, inside, 0.0), tl.load(gradient + at, inside, 0.0) * clipping
    m, v = tl.load(exp_avg + at, inside, 0.0), tl.load(exp_avg_sq + at, inside, 0.0)
    m += (given - m) * beta1_left
    v = v * beta2 + given * given * beta2_left
    tl.store(exp_avg + at, m, inside)
    tl.store(exp_avg_sq + at, v, inside)
    change = (m / first) / (tl.sqrt(v / second) + epsilon)
    if is_direction:
        tl.store(out + at, change + weight * decay, inside)
    else:
        weight = weight - rate * decay * weight - rate * change
        tl.store(weights + at, weight, inside)
        if has_copy:
            tl.store(out + at, weight, inside)
