"""Bias, dropout and residual addition, and dropout alone, in one Triton pass each way.

Nothing is kept: backward recomputes the mask. Shapes: s sequence, b microbatch, h hidden.
"""

import torch
import triton
import triton.language as tl

from mlm_repro.engine.kernels.dropout import DropoutMask
from mlm_repro.engine.kernels.gpu.masks import BLOCK, Context, mask_arguments, stays

ROWS, MASK_BLOCKS, STEPS = 4, 4, 16
"""Rows of a tile, columns of a tile in blocks of the mask, and tiles per program in backward."""


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None,
        mask: DropoutMask | None,
    ) -> torch.Tensor:  # fmt: skip
        x = x.contiguous()
        bias = x.new_empty(0) if bias is None else bias.contiguous()
        residual = x.new_empty(0) if residual is None else residual.contiguous()
        ctx.mask = mask_arguments(mask, x.device)
        ctx.bias_dtype, ctx.has_bias, ctx.has_residual = bias.dtype, len(bias) > 0, len(residual) > 0
        output, h = torch.empty_like(x), x.size(-1)
        rows = x.numel() // h
        grid = (triton.cdiv(rows, ROWS), triton.cdiv(h, MASK_BLOCKS * BLOCK))
        _bias_dropout_add[grid](
            x, bias, residual, output, *ctx.mask, rows, x.size(1), h, ctx.has_bias, ctx.has_residual, mask is not None,
            ROWS, MASK_BLOCKS,
        )  # fmt: skip
        return output

    @staticmethod
    def backward(
        ctx: Context, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, None]:
        gradient = gradient.contiguous()
        has_mask = len(ctx.mask[0]) > 0
        to_x, h = torch.empty_like(gradient) if has_mask else gradient, gradient.size(-1)
        rows = gradient.numel() // h
        grid = (triton.cdiv(rows, ROWS * STEPS), triton.cdiv(h, MASK_BLOCKS * BLOCK))
        parts = torch.empty(grid[0] if ctx.has_bias else 0, h, dtype=torch.float32, device=gradient.device)
        _gradient[grid](
            gradient, to_x, parts, *ctx.mask, rows, gradient.size(1), h, ctx.has_bias, has_mask, ROWS, MASK_BLOCKS,
            STEPS,
        )  # fmt: skip
        to_bias = parts.sum(0).to(ctx.bias_dtype) if ctx.has_bias else None
        return to_x, to_bias, gradient if ctx.has_residual else None, None


fused = _BiasDropoutAdd.apply
"""residual + dropout(x + bias), for x and residual [s, b, h] and bias [h]; (x, bias, residual, mask)."""


def dropout(x: torch.Tensor, mask: DropoutMask) -> torch.Tensor:
    """x [s, b, h] with dropped elements set to zero and the others multiplied by 1/(1 − p)."""
    output: torch.Tensor = _BiasDropoutAdd.apply(x, None, None, mask)
    return output


@triton.jit
def _bias_dropout_add(
    x, bias, residual, output, keys, first_row, threshold, scale, rows, b, h,
    has_bias: tl.constexpr, has_residual: tl.constexpr, has_mask: tl.constexpr, r: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * r + tl.arange(0, r)
    column = tl.program_id(1) * (128 * c) + tl.arange(0, 128 * c)[None, :]
    inside = (row[:, None] < rows) & (column < h)
    at = row[:, None].to(tl.int64) * h + column
    value = tl.load(x + at, inside, 0.0).to(tl.float32)
    if has_bias:
        value += tl.load(bias + column, column < h, 0.0).to(tl.float32)
    if has_mask:
        key = tl.load(keys + row % b)
        keep = stays(key, first_row + row // b, tl.program_id(1) * c, threshold, r, c)
        value = tl.where(keep, value * scale, 0.0)
    if has_residual:
        value += tl.load(residual + at, inside, 0.0).to(tl.float32)
    tl.store(output + at, value, inside)


@triton.jit
def _gradient(
    gradient, to_x, parts, keys, first_row, threshold, scale, rows, b, h,
    has_bias: tl.constexpr, has_mask: tl.constexpr, r: tl.constexpr, c: tl.constexpr, steps: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * (128 * c) + tl.arange(0, 128 * c)[None, :]
    total = tl.zeros([r, 128 * c], tl.float32)
    for step in range(steps):
        row = (tl.program_id(0) * steps + step) * r + tl.arange(0, r)
        inside = (row[:, None] < rows) & (column < h)
        at = row[:, None].to(tl.int64) * h + column
        value = tl.load(gradient + at, inside, 0.0).to(tl.float32)
        if has_mask:
            key = tl.load(keys + row % b)
            value = tl.where(
                stays(key, first_row + row // b, tl.program_id(1) * c, threshold, r, c), value * scale, 0.0
            )
            tl.store(to_x + at, value, inside)
        if has_bias:
            total += value
    if has_bias:
        at = tl.program_id(1) * (128 * c) + tl.arange(0, 128 * c)
        tl.store(parts + tl.program_id(0).to(tl.int64) * h + at, tl.sum(total, 0), at < h)
