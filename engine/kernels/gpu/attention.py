"""Flash attention with dropout in Triton (Dao et al. 2022, 2023, arXiv 2205.14135 and 2307.08691).

Torch's own flash kernels cannot use the dropout mask of `engine/rng.py`. Here a separate kernel draws the mask once,
one bit per score, and backward reuses it. All sums have a fixed order. Shapes: s sequence, b microbatch, n heads, d
head dim; w is d rounded up to a power of two; a program handles m queries and c keys at a time.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from mlm_repro.engine.kernels.attention import reference
from mlm_repro.engine.kernels.dropout import DropoutMask
from mlm_repro.engine.kernels.gpu.masks import BLOCK, Context, mask_arguments, packed

DRAWN_ROWS, INNER_ROWS = 64, 32
LOG2_E = tl.constexpr(math.log2(math.e))


class Tiles(NamedTuple):
    """Queries and keys that a program handles at a time, its warps and pipeline stages."""

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2


HOPPER = 90


def width_of(d: int) -> int:
    """Columns of a tile: the head dim rounded up to a power of two."""
    return max(triton.next_power_of_2(d), 16)


def compute_capability() -> int:
    """Compute capability of the current GPU. Under Triton's interpreter it is an H100's."""
    try:
        return int(driver.active.get_current_target().arch)
    except RuntimeError:
        return HOPPER


def tiles_for(d: int, dtype: torch.dtype) -> tuple[Tiles, Tiles, Tiles]:
    """Tiles for outputs, for gradients of queries, and for gradients of keys and values.

    For 16-bit numbers and head dims up to 128 they are the fastest of those tried on an H200, or within a twentieth of
    it (`python -m benchmarks gpu --items tiles`). Others are chosen by registers and memory.
    """
    width = width_of(d)
    if dtype == torch.float32:
        return (Tiles(32, 32, 8, 1),) * 3
    if width > 128:
        return Tiles(64, 32, 8), Tiles(64, 32, 8), Tiles(16, 64, 8)
    if width == 128 and compute_capability() < HOPPER:
        return Tiles(128, 32, 8), Tiles(64, 64, 8), Tiles(16, 128, 8)
    outputs = Tiles(64, 32, stages=3) if 64 < d < 128 else Tiles(64, 64)
    return outputs, Tiles(64, 64), Tiles(32, 64)


def flash(query_key_value: torch.Tensor, mask: DropoutMask | None) -> torch.Tensor:
    """Outputs of all heads, [s, b, n·d], of causal attention from queries, keys and values [s, b, n, 3, d].

    Without dropout, torch's scaled-dot-product attention chooses among its own flash kernels.
    """
    context: torch.Tensor = reference(query_key_value, None) if mask is None else _Flash.apply(query_key_value, mask)
    return context


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, qkv: torch.Tensor, mask: DropoutMask) -> torch.Tensor:
        qkv = qkv.contiguous()
        s, b, n, _, d = qkv.shape
        width = width_of(d)
        context = qkv.new_empty(s, b, n * d)
        sums = torch.empty(b * n, s, dtype=torch.float32, device=qkv.device)
        keys, first_row, threshold, keep_scale = mask_arguments(mask, qkv.device)
        blocks = triton.cdiv(s, BLOCK)
        bits = torch.empty(b * n, s, blocks * BLOCK // 8, dtype=torch.uint8, device=qkv.device)
        _draw[triton.cdiv(s, DRAWN_ROWS), blocks, b * n](keys, bits, first_row, threshold, s, n, DRAWN_ROWS)
        ctx.factors, ctx.sizes = (keep_scale, 1.0 / math.sqrt(d)), (s, b, n)
        tiles, *ctx.tiles = tiles_for(d, qkv.dtype)
        _forward[triton.cdiv(s, tiles.queries), b * n](
            qkv, context, sums, bits, *ctx.factors, *ctx.sizes, d, tiles.queries, tiles.keys, width,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        ctx.save_for_backward(qkv, context, sums, bits)
        return context

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        qkv, context, sums, bits = ctx.saved_tensors
        gradient, qkv_gradient = gradient.contiguous(), torch.empty_like(qkv)
        s, b, n, _, d = qkv.shape
        width, inner = width_of(d), torch.empty_like(sums)
        given: tuple[Any, ...] = (qkv, gradient, qkv_gradient, sums, inner, bits, *ctx.factors, *ctx.sizes, d)
        _inner[triton.cdiv(s, INNER_ROWS), b * n](gradient, context, inner, s, b, n, d, INNER_ROWS, width)
        to_query, to_key = ctx.tiles
        for kernel, tiles, each in ((_to_query, to_query, to_query.queries), (_to_key_value, to_key, to_key.keys)):
            kernel[triton.cdiv(s, each), b * n](
                *given, tiles.queries, tiles.keys, width, num_warps=tiles.warps, num_stages=tiles.stages
            )
        return qkv_gradient, None


@triton.jit
def _draw(keys, bits, first_row, threshold, s, n, r: tl.constexpr):
    """Write the mask's bits, 8 per byte, for `r` queries and 128 keys. Tiles of later keys are skipped."""
    group, start = tl.program_id(2), tl.program_id(0) * r
    if tl.program_id(1) * 128 < start + r:
        query = start + tl.arange(0, r)
        key = tl.load(keys + group // n) + query.to(tl.int64) * 0
        drawn = packed(key, first_row + group % n * s + query, tl.program_id(1), threshold)
        at = (group.to(tl.int64) * s + query[:, None]) * (tl.num_programs(1) * 16)
        at += tl.program_id(1) * 16 + tl.arange(0, 16)[None, :]
        tl.store(bits + at, drawn, query[:, None] < s)


@triton.jit
def _tile(base, first, stride, s, r: tl.constexpr, d: tl.constexpr, w: tl.constexpr):
    """Load rows of one head, [r, w], starting at `first`. Missing rows are zero."""
    row, column = tl.arange(0, r)[:, None], tl.arange(0, w)[None, :]
    inside = (row < s - first) & (column < d)
    return tl.load(base + tl.cast(first, tl.int64) * stride + (row * stride + column), inside, 0.0)


@triton.jit
def _put(base, first, stride, value, s, r: tl.constexpr, d: tl.constexpr, w: tl.constexpr):
    row, column = tl.arange(0, r)[:, None], tl.arange(0, w)[None, :]
    inside = (row < s - first) & (column < d)
    tl.store(base + tl.cast(first, tl.int64) * stride + (row * stride + column), value, inside)


@triton.jit
def _stays(bits, group, query, key, s):
    """True where a weight is not dropped. Queries are a column and keys a row, or the reverse."""
    row = (s + 127) // 128 * 16
    at = tl.minimum(query, s - 1) * row + key // 128 * 16 + key % 16
    return (tl.load(bits + group.to(tl.int64) * s * row + at) >> (key % 128 // 16).to(tl.uint8)) & 1 != 0


@triton.jit
def _attend(
    q, base, bits, scale, s, stride, group, query, start, top, total, mixed, is_edge: tl.constexpr,
    c: tl.constexpr, d: tl.constexpr, w: tl.constexpr,
):  # fmt: skip
    """Add `c` keys to the largest score, the sum and the mixture of values. At an edge some of them are later ones."""
    key = start + tl.arange(0, c)
    k, v = _tile(base + d, start, stride, s, c, d, w), _tile(base + 2 * d, start, stride, s, c, d, w)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if is_edge:
        scores = tl.where(key[None, :] <= query[:, None], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    weights, fade = tl.exp2(scores - higher[:, None]), tl.exp2(top - higher)
    total = total * fade + tl.sum(weights, 1)
    weights = tl.where(_stays(bits, group, query[:, None], key[None, :], s), weights, 0.0).to(v.dtype)
    return higher, total, tl.dot(weights, v, mixed * fade[:, None], input_precision="ieee")


@triton.jit
def _forward(
    qkv, context, sums, bits, keep_scale, scale, s, b, n, d: tl.constexpr,
    m: tl.constexpr, c: tl.constexpr, w: tl.constexpr,
):  # fmt: skip
    group, first = tl.program_id(1), (tl.num_programs(0) - 1 - tl.program_id(0)) * m
    stride, base = b * n * 3 * d, qkv + group.to(tl.int64) * 3 * d
    query = first + tl.arange(0, m)
    q = _tile(base, first, stride, s, m, d, w)
    scale = scale * LOG2_E
    top = tl.full([m], float("-inf"), tl.float32)
    total, mixed = tl.zeros([m], tl.float32), tl.zeros([m, w], tl.float32)
    edge = (first + 1) // c * c
    for start in range(0, edge, c):
        top, total, mixed = _attend(
            q, base, bits, scale, s, stride, group, query, start, top, total, mixed, False, c, d, w
        )
    for start in range(edge, tl.minimum(first + m, s), c):
        top, total, mixed = _attend(
            q, base, bits, scale, s, stride, group, query, start, top, total, mixed, True, c, d, w
        )
    _put(context + group.to(tl.int64) * d, first, b * n * d, mixed * (keep_scale / total)[:, None], s, m, d, w)
    tl.store(sums + group.to(tl.int64) * s + query, top + tl.log2(total), query < s)


@triton.jit
def _inner(gradient, context, inner, s, b, n, d: tl.constexpr, m: tl.constexpr, w: tl.constexpr):
    """Write the inner product of each query's output and the output's gradient."""
    group = tl.program_id(1)
    first, at, stride = tl.program_id(0) * m, group.to(tl.int64) * d, b * n * d
    given = _tile(gradient + at, first, stride, s, m, d, w).to(tl.float32)
    product = tl.sum(given * _tile(context + at, first, stride, s, m, d, w).to(tl.float32), 1)
    query = first + tl.arange(0, m)
    tl.store(inner + group.to(tl.int64) * s + query, product, query < s)


@triton.jit
def _query_slopes(
    q, given, base, bits, keep_scale, scale, s, stride, group, query, start, log_sum, inner, total,
    is_edge: tl.constexpr, c: tl.constexpr, d: tl.constexpr, w: tl.constexpr,
):  # fmt: skip
    """Add the contribution of `c` keys to the gradient of the queries."""
    key = start + tl.arange(0, c)
    k, v = _tile(base + d, start, stride, s, c, d, w), _tile(base + 2 * d, start, stride, s, c, d, w)
    weights = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale - log_sum[:, None])
    if is_edge:
        weights = tl.where(key[None, :] <= query[:, None], weights, 0.0)
    slopes = tl.dot(given, tl.trans(v), input_precision="ieee") * keep_scale
    slopes = tl.where(_stays(bits, group, query[:, None], key[None, :], s), slopes, 0.0) - inner[:, None]
    return tl.dot((weights * slopes).to(k.dtype), k, total, input_precision="ieee")


@triton.jit
def _to_query(
    qkv, gradient, qkv_gradient, sums, inners, bits, keep_scale, scale, s, b, n, d: tl.constexpr,
    m: tl.constexpr, c: tl.constexpr, w: tl.constexpr,
):  # fmt: skip
    group, first = tl.program_id(1), (tl.num_programs(0) - 1 - tl.program_id(0)) * m
    stride, base, at = b * n * 3 * d, qkv + group.to(tl.int64) * 3 * d, group.to(tl.int64) * s
    query = first + tl.arange(0, m)
    q = _tile(base, first, stride, s, m, d, w)
    given = _tile(gradient + group.to(tl.int64) * d, first, b * n * d, s, m, d, w)
    log_sum = tl.load(sums + at + query, query < s, float("inf"))
    inner = tl.load(inners + at + query, query < s, 0.0)
    total = tl.zeros([m, w], tl.float32)
    edge = (first + 1) // c * c
    for start in range(0, edge, c):
        total = _query_slopes(
            q, given, base, bits, keep_scale, scale * LOG2_E, s, stride, group, query,
            start, log_sum, inner, total, False, c, d, w,
        )  # fmt: skip
    for start in range(edge, tl.minimum(first + m, s), c):
        total = _query_slopes(
            q, given, base, bits, keep_scale, scale * LOG2_E, s, stride, group, query,
            start, log_sum, inner, total, True, c, d, w,
        )  # fmt: skip
    _put(qkv_gradient + group.to(tl.int64) * 3 * d, first, stride, total * scale, s, m, d, w)


@triton.jit
def _key_slopes(
    k, v, base, gradient, sums, inners, bits, keep_scale, scale, s, b, n, group, key, row, to_key, to_value,
    m: tl.constexpr, d: tl.constexpr, w: tl.constexpr,
):  # fmt: skip
    """Add the contribution of `m` queries to the gradients of keys and values."""
    query, at = row + tl.arange(0, m), group.to(tl.int64) * s
    q = _tile(base, row, b * n * 3 * d, s, m, d, w)
    given = _tile(gradient + group.to(tl.int64) * d, row, b * n * d, s, m, d, w)
    log_sum = tl.load(sums + at + query, query < s, float("inf"))
    inner = tl.load(inners + at + query, query < s, 0.0)
    weights = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * scale - log_sum[None, :])
    weights = tl.where(key[:, None] <= query[None, :], weights, 0.0)
    stays = _stays(bits, group, query[None, :], key[:, None], s)
    to_value = tl.dot(tl.where(stays, weights, 0.0).to(q.dtype), given, to_value, input_precision="ieee")
    slopes = tl.dot(v, tl.trans(given), input_precision="ieee") * keep_scale
    slopes = weights * (tl.where(stays, slopes, 0.0) - inner[None, :])
    return tl.dot(slopes.to(q.dtype), q, to_key, input_precision="ieee"), to_value


@triton.jit
def _to_key_value(
    qkv, gradient, qkv_gradient, sums, inners, bits, keep_scale, scale, s, b, n, d: tl.constexpr,
    m: tl.constexpr, c: tl.constexpr, w: tl.constexpr,
):  # fmt: skip
    group, start = tl.program_id(1), tl.program_id(0) * c
    stride, base = b * n * 3 * d, qkv + group.to(tl.int64) * 3 * d
    key = start + tl.arange(0, c)
    k, v = _tile(base + d, start, stride, s, c, d, w), _tile(base + 2 * d, start, stride, s, c, d, w)
    to_key, to_value = tl.zeros([c, w], tl.float32), tl.zeros([c, w], tl.float32)
    for row in range(start // m * m, s, m):
        to_key, to_value = _key_slopes(
            k, v, base, gradient, sums, inners, bits, keep_scale, scale * LOG2_E, s, b, n, group,
            key, row, to_key, to_value, m, d, w,
        )  # fmt: skip
    out = qkv_gradient + group.to(tl.int64) * 3 * d
    _put(out + d, start, stride, to_key * scale, s, c, d, w)
    _put(out + 2 * d, start, stride, to_value * keep_scale, s, c, d, w)
