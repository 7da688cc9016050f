"""Bias, dropout and residual addition, dropout alone, and layer norm with or without them, in one
Triton pass each way.

Nothing is kept but the sum: backward recomputes mask, mean and deviation. Gradients of bias and
norm are summed in a fixed order. Shapes: s sequence, b microbatch, h hidden.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlm_repro.engine.kernels import dropout as references
from mlm_repro.engine.kernels.dropout import DropoutMask
from mlm_repro.engine.kernels.gpu.masks import BLOCK, Context, mask_arguments, stays, warps

ROWS, MASK_BLOCKS, STEPS = 4, 4, 16
"""Three sizes of the kernels: rows per tile, columns per tile in blocks of the mask of 128 columns,
and tiles per program in backward. With a norm a tile has one whole row."""
WIDEST = 8192
"""Largest number of elements in a row that a program with a norm holds in registers; wider rows go
to the reference."""


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        mask: DropoutMask | None,
        weight: Tensor | None = None,
        shift: Tensor | None = None,
        epsilon: float = 0.0,
    ) -> Tensor | tuple[Tensor, Tensor]:
        x, h = x.contiguous(), x.size(-1)
        bias, residual, weight, shift = (
            x.new_empty(0) if tensor is None else tensor.contiguous()
            for tensor in (bias, residual, weight, shift)
        )
        has_bias, has_residual, has_norm = (len(tensor) > 0 for tensor in (bias, residual, weight))
        columns = triton.next_power_of_2(max(h, BLOCK)) if has_norm else MASK_BLOCKS * BLOCK
        ctx.mask = mask_arguments(mask, x.device)
        ctx.rows = 1 if has_norm else ROWS
        ctx.epsilon = epsilon
        ctx.has = (has_bias, mask is not None, has_norm)
        ctx.columns = columns
        # With nothing to add the sum is x itself, which needs no copy.
        adds = has_bias or has_residual or mask is not None
        output = torch.empty_like(x) if adds else x
        normed = torch.empty_like(x if has_norm else weight)
        rows = x.numel() // h
        _bias_dropout_add[triton.cdiv(rows, ctx.rows), triton.cdiv(h, columns)](
            x,
            bias,
            residual,
            output,
            weight,
            shift,
            normed,
            *ctx.mask,
            rows,
            x.size(1),
            h,
            epsilon,
            *ctx.has,
            has_residual,
            adds,
            ctx.rows,
            columns // BLOCK,
            num_warps=warps(columns) if has_norm else 4,
        )
        ctx.dtype = x.dtype
        ctx.has_residual = has_residual
        # Only a norm's backward reads the sum, which is there anyway as the residual stream.
        ctx.save_for_backward(output if has_norm else weight, weight)
        return (output, normed) if has_norm else output

    @staticmethod
    def backward(
        ctx: Context, gradient: Tensor, normed: Tensor | None = None
    ) -> tuple[object, ...]:
        (added, weight), (has_bias, has_mask, has_norm) = ctx.saved_tensors, ctx.has
        gradient, h = gradient.contiguous(), gradient.size(-1)
        normed = gradient if normed is None else normed.contiguous()
        to_sum = torch.empty_like(gradient) if has_norm else gradient
        to_x = torch.empty_like(gradient) if has_mask else to_sum
        rows = gradient.numel() // h
        grid = triton.cdiv(rows, ctx.rows * STEPS), triton.cdiv(h, ctx.columns)
        count = 3 if has_norm else int(has_bias)
        # Partial sums, added afterwards, because atomic additions have another order in each run.
        parts = torch.empty(grid[0], count, h, dtype=torch.float32, device=gradient.device)
        _gradient[grid](
            gradient,
            added,
            normed,
            weight,
            to_sum,
            to_x,
            parts,
            *ctx.mask,
            rows,
            gradient.size(1),
            h,
            ctx.epsilon,
            *ctx.has,
            count,
            ctx.rows,
            ctx.columns // BLOCK,
            STEPS,
            num_warps=warps(ctx.columns) if has_norm else 4,
        )
        sums = [*parts.sum(0).to(ctx.dtype), None, None] if count else [None, None, None]
        to_bias = sums[0] if has_bias else None
        to_residual = to_sum if ctx.has_residual else None
        return to_x, to_bias, to_residual, None, *(sums[1:3] if has_norm else (None, None)), None


fused = _AddNorm.apply
"""Differentiable function (x [s, b, h], bias [h], residual [s, b, h], DropoutMask or None) →
residual + dropout(x + bias), a new tensor [s, b, h], on a GPU. Without a mask nothing is
dropped."""


def dropout(x: Tensor, mask: DropoutMask) -> Tensor:
    """Return a new tensor in the dtype of x [s, b, h], a tensor on a GPU: the elements that `mask`
    drops are zero, and the others are multiplied by 1/(1 − p), p the mask's probability. `mask`, a
    DropoutMask, has a key for each of the b sequences; its rows from `first_row` on are the s
    positions. Differentiable."""
    output: Tensor = _AddNorm.apply(x, None, None, mask)
    return output


def add_norm(
    x: Tensor,
    weight: Tensor,
    shift: Tensor,
    branch: Tensor | None,
    bias: Tensor | None,
    mask: DropoutMask | None,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """Return a pair of tensors [s, b, h] on a GPU: the sum x + dropout(branch + bias), and the
    layer norm of this sum, with scale `weight` [h] and offset `shift` [h]; `epsilon` is added to
    the sum's variance. `x` and `branch` are [s, b, h]; `bias` is [h], and None adds nothing.
    `mask`, a DropoutMask, decides what is dropped; None drops nothing. If `branch` is None, the sum
    is x itself, `bias` is ignored, and `mask` must be None. Differentiable."""
    # A wider row would not fit the registers; the reference makes two kernels of it.
    if x.size(-1) > WIDEST:
        return references.add_norm(x, weight, shift, branch, bias, mask, epsilon)
    given = (x, None, None) if branch is None else (branch, bias, x)
    both: tuple[Tensor, Tensor] = _AddNorm.apply(*given, mask, weight, shift, epsilon)
    return both


@triton.jit
def _centred(value, inside, h, epsilon):
    """Return a pair: `value`, rows of `h` numbers, less the mean of each row and zero where
    `inside` is False; and the inverse of each row's standard deviation, as a column. `value` must
    be zero where `inside` is False; `epsilon` is added to the variance."""
    value = tl.where(inside, value - tl.sum(value, 1)[:, None] / h, 0.0)
    return value, 1.0 / tl.sqrt_rn(tl.sum(value * value, 1) / h + epsilon)[:, None]


@triton.jit
def _bias_dropout_add(
    x,
    bias,
    residual,
    output,
    weight,
    shift,
    normed,
    keys,
    first_row,
    threshold,
    scale,
    rows,
    b,
    h,
    epsilon,
    # Known when the kernel is compiled, so that what is absent costs nothing.
    has_bias: tl.constexpr,
    has_mask: tl.constexpr,
    has_norm: tl.constexpr,
    has_residual: tl.constexpr,
    adds: tl.constexpr,
    r: tl.constexpr,
    c: tl.constexpr,
):
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
    if adds:
        tl.store(output + at, value, inside)
    if has_norm:
        # The norm is of the rounded sum, as if it were read from memory, so that backward meets the
        # same numbers.
        value = value.to(output.dtype.element_ty).to(tl.float32)
        centred, inverse = _centred(value, inside, h, epsilon)
        value = centred * inverse * tl.load(weight + column, column < h, 0.0).to(tl.float32)
        tl.store(
            normed + at, value + tl.load(shift + column, column < h, 0.0).to(tl.float32), inside
        )


@triton.jit
def _gradient(
    gradient,
    added,
    normed,
    weight,
    to_sum,
    to_x,
    parts,
    keys,
    first_row,
    threshold,
    scale,
    rows,
    b,
    h,
    epsilon,
    has_bias: tl.constexpr,
    has_mask: tl.constexpr,
    has_norm: tl.constexpr,
    count: tl.constexpr,
    r: tl.constexpr,
    c: tl.constexpr,
    steps: tl.constexpr,
):
    column = tl.program_id(1) * (128 * c) + tl.arange(0, 128 * c)[None, :]
    total = tl.zeros([r, 128 * c], tl.float32)
    to_weight = total
    to_shift = total
    if has_norm:
        factor = tl.load(weight + column, column < h, 0.0).to(tl.float32)
    for step in range(steps):
        row = (tl.program_id(0) * steps + step) * r + tl.arange(0, r)
        inside = (row[:, None] < rows) & (column < h)
        at = row[:, None].to(tl.int64) * h + column
        value = tl.load(gradient + at, inside, 0.0).to(tl.float32)
        if has_norm:
            centred, inverse = _centred(
                tl.load(added + at, inside, 0.0).to(tl.float32), inside, h, epsilon
            )
            centred *= inverse
            given = tl.load(normed + at, inside, 0.0).to(tl.float32)
            to_weight += given * centred
            to_shift += given
            slope = given * factor
            along = tl.sum(slope * centred, 1)[:, None] / h
            value += tl.where(
                inside, (slope - tl.sum(slope, 1)[:, None] / h - centred * along) * inverse, 0.0
            )
            tl.store(to_sum + at, value, inside)
        if has_mask:
            key = tl.load(keys + row % b)
            keep = stays(key, first_row + row // b, tl.program_id(1) * c, threshold, r, c)
            value = tl.where(keep, value * scale, 0.0)
            tl.store(to_x + at, value, inside)
        if has_bias:
            total += value
    at = tl.program_id(1) * (128 * c) + tl.arange(0, 128 * c)
    first = tl.program_id(0).to(tl.int64) * count * h + at
    if has_bias:
        tl.store(parts + first, tl.sum(total, 0), at < h)
    if has_norm:
        tl.store(parts + first + h, tl.sum(to_weight, 0), at < h)
        tl.store(parts + first + 2 * h, tl.sum(to_shift, 0), at < h)
