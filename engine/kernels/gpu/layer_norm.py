"""Layer norm in one Triton pass each way. A program holds a whole row in registers."""

import torch
import triton
import triton.language as tl

from engine.kernels.gpu.masks import Context, warps

PROGRAMS = 528
"""Programs of the backward pass, four for each of an H200's 132 processors. Each sums its part of the gradient."""


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float
    ) -> torch.Tensor:  # fmt: skip
        x, weight = x.contiguous(), weight.contiguous()
        output, h = torch.empty_like(x), len(weight)
        rows = x.numel() // h
        means, scales = torch.empty(2, rows, dtype=torch.float32, device=x.device).unbind(0)
        width = triton.next_power_of_2(h)
        _normalize[(rows,)](x, weight, bias.contiguous(), output, means, scales, h, epsilon, width, num_warps=warps(h))
        ctx.save_for_backward(x, weight, means, scales)
        return output

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        x, weight, means, scales = ctx.saved_tensors
        to_x, h = torch.empty_like(x), len(weight)
        rows = x.numel() // h
        each = triton.cdiv(rows, PROGRAMS)
        programs = triton.cdiv(rows, each)
        parts = torch.empty(2, programs, h, dtype=torch.float32, device=x.device)
        _gradient[(programs,)](
            x, weight, gradient.contiguous(), to_x, means, scales, parts[0], parts[1], rows, h, each,
            triton.next_power_of_2(h), num_warps=warps(h),
        )  # fmt: skip
        to_weight, to_bias = parts.sum(1).to(weight.dtype).unbind(0)
        return to_x, to_weight, to_bias, None


fused = _LayerNorm.apply
"""Rows of x [..., h], normalised, times weight [h], plus bias [h]; (x, weight, bias, epsilon)."""


@triton.jit
def _normalize(x, weight, bias, output, means, scales, h, epsilon, width: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, width)
    inside = column < h
    value = tl.load(x + row * h + column, inside, 0.0).to(tl.float32)
    mean = tl.sum(value, 0) / h
    centred = tl.where(inside, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / h + epsilon)
    w = tl.load(weight + column, inside, 0.0).to(tl.float32)
    shift = tl.load(bias + column, inside, 0.0).to(tl.float32)
    tl.store(output + row * h + column, centred * scale * w + shift, inside)
    tl.store(means + row, mean)
    tl.store(scales + row, scale)


@triton.jit
def _gradient(
    x, weight, gradient, to_x, means, scales, weight_parts, bias_parts, rows, h, each, width: tl.constexpr
):  # fmt: skip
    column = tl.arange(0, width)
    inside = column < h
    w = tl.load(weight + column, inside, 0.0).to(tl.float32)
    to_weight, to_bias = tl.zeros([width], tl.float32), tl.zeros([width], tl.float32)
    first = tl.program_id(0).to(tl.int64) * each
    for row in range(first, tl.minimum(first + each, rows)):
        scale = tl.load(scales + row)
        normed = (tl.load(x + row * h + column, inside, 0.0).to(tl.float32) - tl.load(means + row)) * scale
        normed = tl.where(inside, normed, 0.0)
        given = tl.load(gradient + row * h + column, inside, 0.0).to(tl.float32)
        slope = given * w
        along, mean = tl.sum(slope * normed, 0) / h, tl.sum(slope, 0) / h
        tl.store(to_x + row * h + column, (slope - mean - normed * along) * scale, inside)
        to_weight += given * normed
        to_bias += given
    at = tl.program_id(0).to(tl.int64) * h + column
    tl.store(weight_parts + at, to_weight, inside)
    tl.store(bias_parts + at, to_bias, inside)
