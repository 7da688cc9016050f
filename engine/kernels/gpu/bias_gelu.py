"""Bias and GeLU in its tanh form, in one Triton pass each way. The bias's gradient is summed in a
fixed order."""

import math

import torch
import triton
import triton.language as tl

from mlm_repro.engine.kernels.gpu.masks import Context

SLOPE = tl.constexpr(2.0 * math.sqrt(2.0 / math.pi))
CUBIC = tl.constexpr(0.044715)
ROWS, COLUMNS, STEPS = 4, 512, 16
"""Three sizes of the kernels: rows and columns per tile, and tiles per program in backward."""


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        bias = bias.contiguous()
        ctx.save_for_backward(x, bias)
        output = torch.empty_like(x)
        h = len(bias)
        rows = x.numel() // h
        grid = (triton.cdiv(rows, ROWS), triton.cdiv(h, COLUMNS))
        _bias_gelu[grid](x, bias, output, rows, h, ROWS, COLUMNS)
        return output

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, bias = ctx.saved_tensors
        to_x = torch.empty_like(x)
        h = len(bias)
        rows = x.numel() // h
        grid = (triton.cdiv(rows, ROWS * STEPS), triton.cdiv(h, COLUMNS))
        # Partial sums, added afterwards, because atomic additions have another order in each run.
        parts = torch.empty(grid[0], h, dtype=torch.float32, device=x.device)
        _bias_gelu_gradient[grid](
            x, bias, gradient.contiguous(), to_x, parts, rows, h, ROWS, COLUMNS, STEPS
        )
        return to_x, parts.sum(0).to(bias.dtype)


fused = _BiasGelu.apply
"""Differentiable function (x [..., h], bias [h]) → GeLU(x + bias) in its tanh form, a new tensor
[..., h], on a GPU. Only x and bias are kept for backward."""


@triton.jit
def _odds(x):
    """Return e^(−z), at most e⁸⁰, as a tensor in the shape of x, activations with their bias added.
    z is the argument of σ, 2√(2/π)(x + 0.044715x³), so GeLU(x) is x / (1 + e^(−z))."""
    exponent = (x + x * x * x * CUBIC) * -SLOPE
    # Bounded, because an infinite exponential times 0 would make a gradient NaN.
    return tl.exp(tl.where(exponent > 80.0, 80.0, exponent))


@triton.jit
def _bias_gelu(x, bias, output, rows, h, r: tl.constexpr, c: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * r + tl.arange(0, r)[:, None]
    column = tl.program_id(1) * c + tl.arange(0, c)[None, :]
    inside = (row < rows) & (column < h)
    value = tl.load(x + row * h + column, inside, 0.0).to(tl.float32)
    value += tl.load(bias + column, column < h, 0.0).to(tl.float32)
    tl.store(output + row * h + column, value / (1.0 + _odds(value)), inside)


@triton.jit
def _bias_gelu_gradient(
    x, bias, gradient, to_x, parts, rows, h, r: tl.constexpr, c: tl.constexpr, steps: tl.constexpr
):
    column = tl.program_id(1) * c + tl.arange(0, c)[None, :]
    added = tl.load(bias + column, column < h, 0.0).to(tl.float32)
    total = tl.zeros([r, c], tl.float32)
    for step in range(steps):
        row = (tl.program_id(0).to(tl.int64) * steps + step) * r + tl.arange(0, r)[:, None]
        inside = (row < rows) & (column < h)
        value = tl.load(x + row * h + column, inside, 0.0).to(tl.float32) + added
        odds = _odds(value)
        share = 1.0 / (1.0 + odds)
        inner = (1.0 + value * value * (3.0 * CUBIC)) * SLOPE
        slope = share + value * share * share * odds * inner
        slope *= tl.load(gradient + row * h + column, inside, 0.0).to(tl.float32)
        tl.store(to_x + row * h + column, slope, inside)
        total += slope
    at = tl.program_id(1) * c + tl.arange(0, c)
    tl.store(parts + tl.program_id(0).to(tl.int64) * h + at, tl.sum(total, 0), at < h)
