"""Scale, mask and softmax in one Triton pass each way. A program holds a whole row of scores in
registers.

Shapes: b microbatch, n heads, s queries, k keys.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlm_repro.engine.kernels.gpu.masks import Context, warps


class _MaskedSoftmax(torch.autograd.Function):
    """Autograd function (scores [b, n, s, k], scale, visible) → softmax over the keys of scores ×
    scale, in the scores' shape and dtype: causal without `visible`, with the last query seeing
    every key, else over the keys where `visible` [b, 1, s or 1, k] is True. A query that sees no
    key gives 0. It keeps the scores for backward, and not the weights, which are rounded."""

    @staticmethod
    def forward(
        ctx: Context, scores: Tensor, scale: float, visible: Tensor | None = None
    ) -> Tensor:
        scores = scores.contiguous()
        b, n, s, k = scores.shape
        seen = (
            # Expanded and not copied: strides of 0 read one mask for all queries.
            scores.new_empty(0, dtype=torch.bool) if visible is None else visible.expand(b, 1, s, k)
        )
        strides = (0, 0, 0) if visible is None else (seen.stride(0), seen.stride(2), seen.stride(3))
        ctx.arguments = (*strides, scale, n, s, k, visible is None, triton.next_power_of_2(k))
        ctx.save_for_backward(scores, seen)
        weights = torch.empty_like(scores)
        _softmax[(b * n * s,)](scores, weights, seen, *ctx.arguments, num_warps=warps(k))
        return weights

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        scores, seen = ctx.saved_tensors
        score_gradient = torch.empty_like(scores)
        k = scores.size(-1)
        grid = (scores.numel() // k,)
        _gradient[grid](
            scores, gradient.contiguous(), score_gradient, seen, *ctx.arguments, num_warps=warps(k)
        )
        return score_gradient, None, None


fused = _MaskedSoftmax.apply
"""Differentiable function (scores [b, n, s, k], scale, visible) → softmax over the keys of scores ×
scale, [b, n, s, k] in the scores' dtype, on a GPU: causal without `visible`, else over the keys
where `visible` [b, 1, s or 1, k] is True. A query without any key gives 0. Arguments are by
position."""


@triton.jit
def _weights(
    scores,
    visible,
    by_sample,
    by_query,
    by_key,
    scale,
    n,
    s,
    k,
    is_causal: tl.constexpr,
    width: tl.constexpr,
):
    """Return one row, the Triton program's own, of the softmax of scores [b, n, s, k] times
    `scale`, as a tensor [width] in fp32: 0 beyond the last key and for keys that the query does not
    see. With `is_causal` these are the later ones, the last query standing at the last key; else
    the ones where `visible`, read with the strides `by_sample`, `by_query` and `by_key`, is False.
    A query that sees no key has 0 everywhere."""
    row = tl.program_id(0).to(tl.int64)
    query = row % s
    sample = row // (n * s)
    key = tl.arange(0, width)
    seen = key < k
    if is_causal:
        seen = seen & (key <= query + k - s)
    else:
        seen = seen & tl.load(
            visible + sample * by_sample + query * by_query + key * by_key, seen, 0
        ).to(tl.int1)
    value = tl.load(scores + row * k + key, seen, 0.0).to(tl.float32) * scale
    value = tl.where(seen, value, float("-inf"))
    top = tl.max(value, 0)
    # A query that sees no key has a maximum of −∞, and −∞ less −∞ is NaN.
    value = tl.exp(value - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(value, 0)
    return value / tl.where(total == 0.0, 1.0, total)


@triton.jit
def _softmax(
    scores,
    weights,
    visible,
    by_sample,
    by_query,
    by_key,
    scale,
    n,
    s,
    k,
    is_causal: tl.constexpr,
    width: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * k + tl.arange(0, width)
    weight = _weights(
        scores, visible, by_sample, by_query, by_key, scale, n, s, k, is_causal, width
    )
    tl.store(weights + at, weight, tl.arange(0, width) < k)


@triton.jit
def _gradient(
    scores,
    gradient,
    score_gradient,
    visible,
    by_sample,
    by_query,
    by_key,
    scale,
    n,
    s,
    k,
    is_causal: tl.constexpr,
    width: tl.constexpr,
):
    inside = tl.arange(0, width) < k
    at = tl.program_id(0).to(tl.int64) * k + tl.arange(0, width)
    weight = _weights(
        scores, visible, by_sample, by_query, by_key, scale, n, s, k, is_causal, width
    )
    slope = tl.load(gradient + at, inside, 0.0).to(tl.float32)
    tl.store(score_gradient + at, weight * (slope - tl.sum(weight * slope, 0)) * scale, inside)
