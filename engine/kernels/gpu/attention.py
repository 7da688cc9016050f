"""Attention with dropout as Triton kernels that keep of all scores one number per query (Dao et al. 2022, 2023, arXiv
2205.14135 and 2307.08691), with the mask of `engine.rng`, which torch's own flash kernels cannot have.

Keys are worked on in blocks of 128, as the mask's bits are made. Nothing is added up in an order that could change.
Shapes: s sequence, b microbatch, n heads, d head dim; w is d rounded up to a power of two.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels.attention import reference
from engine.kernels.dropout_mask import DropoutMask
from engine.kernels.gpu.masks import BLOCK, Context, kept, mask_arguments

QUERIES, QUERIES_OF_KEYS = 64, 32
"""Queries that a program works on at a time; fewer where it holds the gradients of keys and values."""


def flash(query_key_value: torch.Tensor, mask: DropoutMask | None, visible: torch.Tensor | None = None) -> torch.Tensor:
    """Outputs of all heads, [s, b, n·d], from queries, keys and values [s, b, n, 3, d].

    Causal, or a query sees the keys where `visible` [b, s, s] is True; with dropout one that sees none gives 0. Without
    dropout torch's scaled-dot-product attention chooses among its flash kernels.
    """
    if mask is None:
        return reference(query_key_value, mask, visible)
    context: torch.Tensor = _Flash.apply(query_key_value, mask, visible)
    return context


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, qkv: torch.Tensor, mask: DropoutMask, visible: torch.Tensor | None) -> torch.Tensor:
        qkv = qkv.contiguous()
        s, b, n, _, d = qkv.shape
        seen = qkv.new_empty(0, dtype=torch.bool) if visible is None else visible.contiguous()
        context = qkv.new_empty(s, b, n * d)
        sums = torch.empty(b * n, s, dtype=torch.float32, device=qkv.device)
        width = max(triton.next_power_of_2(d), 16)
        keys, first_row, threshold, keep_scale = mask_arguments(mask, qkv.device)
        ctx.rows = (seen, keys, first_row, threshold, keep_scale, 1.0 / math.sqrt(d), s, b, n, d)
        ctx.is_causal, ctx.width = visible is None, width
        grid = (triton.cdiv(s, QUERIES), b * n)
        _forward[grid](
            qkv, context, sums, *ctx.rows, visible is None, QUERIES, width, num_warps=4 if width <= 64 else 8
        )
        ctx.save_for_backward(qkv, context, sums)
        return context

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        qkv, context, sums = ctx.saved_tensors
        gradient, qkv_gradient = gradient.contiguous(), torch.empty_like(qkv)
        s, b, n, _, d = qkv.shape
        inner = torch.empty_like(sums)
        by_query, by_key = (triton.cdiv(s, QUERIES), b * n), (triton.cdiv(s, BLOCK), b * n)
        given: tuple[Any, ...] = (qkv, gradient, qkv_gradient, sums, inner)
        _inner[by_query](gradient, context, inner, s, b, n, d, QUERIES, ctx.width)
        _to_query[by_query](*given, *ctx.rows, ctx.is_causal, QUERIES, ctx.width, num_warps=8, num_stages=2)
        _to_key_value[by_key](*given, *ctx.rows, ctx.is_causal, QUERIES_OF_KEYS, ctx.width, num_warps=8, num_stages=2)
        return qkv_gradient, None, None


@triton.jit
def _tile(base, rows, stride, s, d, w: tl.constexpr):
    """Rows of one head, [rows, w], zero where there are none."""
    column = tl.arange(0, w)[None, :]
    inside = (rows[:, None] < s) & (column < d)
    return tl.load(base + rows[:, None].to(tl.int64) * stride + column, inside, 0.0)


@triton.jit
def _put(base, rows, stride, value, s, d, w: tl.constexpr):
    column = tl.arange(0, w)[None, :]
    inside = (rows[:, None] < s) & (column < d)
    tl.store(base + rows[:, None].to(tl.int64) * stride + column, value, inside)


@triton.jit
def _scores(q, k, visible, sample, query, key, scale, s, is_causal: tl.constexpr):
    """Scaled scores [queries, keys], −∞ where a key is not seen."""
    seen = (query[:, None] < s) & (key[None, :] < s)
    if is_causal:
        seen = seen & (key[None, :] <= query[:, None])
    else:
        at = (sample.to(tl.int64) * s + query[:, None]) * s + key[None, :]
        seen = seen & tl.load(visible + at, seen, 0).to(tl.int1)
    return tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, float("-inf"))


@triton.jit
def _kept(keys, sample, head, query, start, first_row, threshold, s, m: tl.constexpr):
    """Which weights of the queries stay, for the 128 keys from `start` on; a head's rows are head · s + query."""
    key = tl.load(keys + sample) + query.to(tl.int64) * 0
    return kept(key, first_row + head * s + query, start // 128, threshold, m, 1)


@triton.jit
def _forward(
    qkv, context, sums, visible, keys, first_row, threshold, keep_scale, scale, s, b, n, d,
    is_causal: tl.constexpr, m: tl.constexpr, w: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    sample, head, stride = group // n, group % n, b * n * 3 * d
    base = qkv + group.to(tl.int64) * 3 * d
    query = tl.program_id(0) * m + tl.arange(0, m)
    q = _tile(base, query, stride, s, d, w)
    top = tl.full([m], float("-inf"), tl.float32)
    total = tl.zeros([m], tl.float32)
    mixed = tl.zeros([m, w], tl.float32)
    end = tl.minimum((tl.program_id(0) + 1) * m, s) if is_causal else s
    for start in range(0, end, 128):
        key = start + tl.arange(0, 128)
        k, v = _tile(base + d, key, stride, s, d, w), _tile(base + 2 * d, key, stride, s, d, w)
        scores = _scores(q, k, visible, sample, query, key, scale, s, is_causal)
        higher = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights, fade = tl.exp(scores - shift[:, None]), tl.exp(top - shift)
        total = total * fade + tl.sum(weights, 1)
        stays = _kept(keys, sample, head, query, start, first_row, threshold, s, m)
        weights = tl.where(stays, weights, 0.0).to(v.dtype)
        mixed = mixed * fade[:, None] + tl.dot(weights, v, input_precision="ieee")
        top = higher
    factor = tl.where(total == 0.0, 0.0, keep_scale / tl.where(total == 0.0, 1.0, total))
    _put(context + group.to(tl.int64) * d, query, b * n * d, mixed * factor[:, None], s, d, w)
    log_sum = tl.where(total == 0.0, float("inf"), top + tl.log(tl.where(total == 0.0, 1.0, total)))
    tl.store(sums + group.to(tl.int64) * s + query, log_sum, query < s)


@triton.jit
def _inner(gradient, context, inner, s, b, n, d, m: tl.constexpr, w: tl.constexpr):
    """Of each query, the inner product of its output and that one's gradient."""
    group = tl.program_id(1)
    query, at, stride = tl.program_id(0) * m + tl.arange(0, m), group.to(tl.int64) * d, b * n * d
    given = _tile(gradient + at, query, stride, s, d, w).to(tl.float32)
    product = tl.sum(given * _tile(context + at, query, stride, s, d, w).to(tl.float32), 1)
    tl.store(inner + group.to(tl.int64) * s + query, product, query < s)


@triton.jit
def _slopes(
    q, k, v, given, visible, keys, log_sum, inner, sample, head, query, start, first_row, threshold, keep_scale,
    scale, s, is_causal: tl.constexpr, m: tl.constexpr,
):  # fmt: skip
    """Weights after dropout and the gradient of the unscaled scores, [queries, keys], in the inputs' format."""
    key = start + tl.arange(0, 128)
    weights = tl.exp(_scores(q, k, visible, sample, query, key, scale, s, is_causal) - log_sum[:, None])
    stays = _kept(keys, sample, head, query, start, first_row, threshold, s, m)
    slopes = tl.dot(given, tl.trans(v), input_precision="ieee") * keep_scale
    slopes = weights * (tl.where(stays, slopes, 0.0) - inner[:, None]) * scale
    return tl.where(stays, weights * keep_scale, 0.0).to(q.dtype), slopes.to(q.dtype)


@triton.jit
def _to_query(
    qkv, gradient, qkv_gradient, sums, inners, visible, keys, first_row, threshold, keep_scale, scale, s, b, n, d,
    is_causal: tl.constexpr, m: tl.constexpr, w: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    sample, head, stride, at = group // n, group % n, b * n * 3 * d, group.to(tl.int64) * s
    base = qkv + group.to(tl.int64) * 3 * d
    query = tl.program_id(0) * m + tl.arange(0, m)
    q = _tile(base, query, stride, s, d, w)
    given = _tile(gradient + group.to(tl.int64) * d, query, b * n * d, s, d, w)
    log_sum = tl.load(sums + at + query, query < s, float("inf"))
    inner = tl.load(inners + at + query, query < s, 0.0)
    total = tl.zeros([m, w], tl.float32)
    end = tl.minimum((tl.program_id(0) + 1) * m, s) if is_causal else s
    for start in range(0, end, 128):
        key = start + tl.arange(0, 128)
        k, v = _tile(base + d, key, stride, s, d, w), _tile(base + 2 * d, key, stride, s, d, w)
        _, slopes = _slopes(
            q, k, v, given, visible, keys, log_sum, inner, sample, head, query, start, first_row, threshold,
            keep_scale, scale, s, is_causal, m,
        )  # fmt: skip
        total += tl.dot(slopes, k, input_precision="ieee")
    _put(qkv_gradient + group.to(tl.int64) * 3 * d, query, stride, total, s, d, w)


@triton.jit
def _to_key_value(
    qkv, gradient, qkv_gradient, sums, inners, visible, keys, first_row, threshold, keep_scale, scale, s, b, n, d,
    is_causal: tl.constexpr, m: tl.constexpr, w: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    sample, head, stride, at = group // n, group % n, b * n * 3 * d, group.to(tl.int64) * s
    base = qkv + group.to(tl.int64) * 3 * d
    start = tl.program_id(0) * 128
    key = start + tl.arange(0, 128)
    k, v = _tile(base + d, key, stride, s, d, w), _tile(base + 2 * d, key, stride, s, d, w)
    to_key, to_value = tl.zeros([128, w], tl.float32), tl.zeros([128, w], tl.float32)
    first = start // m * m if is_causal else 0
    for row in range(first, s, m):
        query = row + tl.arange(0, m)
        q = _tile(base, query, stride, s, d, w)
        given = _tile(gradient + group.to(tl.int64) * d, query, b * n * d, s, d, w)
        log_sum = tl.load(sums + at + query, query < s, float("inf"))
        inner = tl.load(inners + at + query, query < s, 0.0)
        weights, slopes = _slopes(
            q, k, v, given, visible, keys, log_sum, inner, sample, head, query, start, first_row, threshold,
            keep_scale, scale, s, is_causal, m,
        )  # fmt: skip
        to_value += tl.dot(tl.trans(weights), given, input_precision="ieee")
        to_key += tl.dot(tl.trans(slopes), q, input_precision="ieee")
    out = qkv_gradient + group.to(tl.int64) * 3 * d
    _put(out + d, key, stride, to_key, s, d, w)
    _put(out + 2 * d, key, stride, to_value, s, d, w)
