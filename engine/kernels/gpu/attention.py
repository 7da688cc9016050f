"""Flash attention with dropout in Triton (Dao et al. 2022, 2023, arXiv 2205.14135 and 2307.08691).

Torch's own flash kernels cannot use the dropout mask of `engine/rng.py`. Here a separate kernel
draws the mask once, one bit per score, and backward reuses it. All sums have a fixed order. Shapes:
s sequence, b microbatch, n heads, d head dim; w and v are the widths of a head's two parts; a
program handles m queries and c keys at a time.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.runtime import driver

from mlm_repro.engine.kernels.attention import reference
from mlm_repro.engine.kernels.dropout import DropoutMask
from mlm_repro.engine.kernels.gpu.masks import BLOCK, Context, mask_arguments, packed

DRAWN_ROWS = 64
BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""List of torch's attention kernels, used on a GPU where there is no dropout, the fastest first."""
LOG2_E = tl.constexpr(math.log2(math.e))


class Tiles(NamedTuple):
    """Sizes with which an attention kernel is launched: the numbers of queries and keys that a
    program handles at a time, of its warps and of its pipeline stages."""

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2


HOPPER = 90


def parts_of(d: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return a pair of numbers, the columns of the two parts into which a head of `d` columns of
    `dtype` is divided, powers of two: the largest that is not above `d`, and the smallest that has
    room for the rest, 64 and 32 for 96, so that products have less padding than with one part. Each
    is at least 16, as tensor cores demand; the second is 0 if there is no rest.

    Before Hopper a 16-bit head has one part, the smallest power of two with room for it: with two,
    registers do not suffice. For the same reason a head of 128 or more columns has two parts in
    fp32, two halves if `d` is a power of two.
    """
    is_wide = dtype == torch.float32
    if compute_capability() < HOPPER and not is_wide:
        return max(triton.next_power_of_2(d), 16), 0
    first = max(triton.next_power_of_2(d if is_wide and d >= 128 else d + 1) // 2, 16)
    return first, max(triton.next_power_of_2(d - first), 16) if d > first else 0


def compute_capability() -> int:
    """Return the current GPU's compute capability, times 10, as an integer: 90 for 9.0. Without a
    GPU, as under Triton's interpreter, it is an H100's, 90."""
    try:
        return int(driver.active.get_current_target().arch)
    except RuntimeError:
        return HOPPER


def tiles_for(d: int, dtype: torch.dtype) -> tuple[Tiles, Tiles, Tiles]:
    """Return a tuple of three Tiles for heads of `d` columns and numbers of `dtype`, the sizes with
    which kernels are launched: for outputs, for gradients of queries, and for gradients of keys and
    values.

    For 16-bit numbers, head dims up to 128 and heads of one part, they are the fastest tried on an
    H200, or at most 5 % slower. The others are chosen so that registers and shared memory suffice.
    """
    width = triton.next_power_of_2(d)
    if dtype == torch.float32:
        return Tiles(32, 16, 8, 1), Tiles(32, 16, 8, 1), Tiles(16, 32, 8, 1)
    if width > 128:
        return Tiles(64, 32, 8), Tiles(64, 32, 8), Tiles(16, 64, 8)
    if width == 128 and compute_capability() < HOPPER:
        return Tiles(128, 32, 8), Tiles(64, 64, 8), Tiles(16, 128, 8)
    outputs = Tiles(64, 32, stages=3) if 64 < d < 128 else Tiles(64, 64)
    return outputs, Tiles(64, 64), Tiles(32, 64)


def flash(query_key_value: Tensor, mask: DropoutMask | None) -> Tensor:
    """Return causal attention's outputs of all heads, [s, b, n·d], differentiable, from one tensor
    of queries, keys and values, [s, b, n, 3, d], on a GPU, in fp32, bf16 or fp16. Scores are
    multiplied by 1/√d. `mask` drops softmax weights; None means no dropout."""
    if mask is None:
        with sdpa_kernel(BACKENDS, set_priority=True):
            return reference(query_key_value, None)
    context: Tensor = _Flash.apply(query_key_value, mask)
    return context


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, qkv: Tensor, mask: DropoutMask) -> Tensor:
        qkv = qkv.contiguous()
        s, b, n, _, d = qkv.shape
        context = qkv.new_empty(s, b, n * d)
        sums = torch.empty(b * n, s, dtype=torch.float32, device=qkv.device)
        keys, first_row, threshold, keep_scale = mask_arguments(mask, qkv.device)
        blocks = triton.cdiv(s, BLOCK)
        # Drawn once, an eighth of a byte for each score, for the forward and both backward kernels.
        bits = torch.empty(b * n, s, blocks * BLOCK // 8, dtype=torch.uint8, device=qkv.device)
        _draw[triton.cdiv(s, DRAWN_ROWS), blocks, b * n](
            keys, bits, first_row, threshold, s, n, DRAWN_ROWS
        )
        ctx.factors = (keep_scale, 1.0 / math.sqrt(d))
        tiles, *ctx.tiles = tiles_for(d, qkv.dtype)
        _launch(_forward, tiles.queries, tiles, qkv, context, sums, bits, *ctx.factors)
        ctx.save_for_backward(qkv, context, sums, bits)
        return context

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        qkv, context, sums, bits = ctx.saved_tensors
        gradient = gradient.contiguous()
        qkv_gradient = torch.empty_like(qkv)
        # Written by `_to_query` and read by `_to_key_value`, which runs after it.
        inner = torch.empty_like(sums)
        to_query, to_key = ctx.tiles
        given = (gradient, context, qkv_gradient, sums, inner, bits, *ctx.factors)
        _launch(_to_query, to_query.queries, to_query, qkv, *given)
        _launch(_to_key_value, to_key.keys, to_key, qkv, *given)
        return qkv_gradient, None


def _launch(kernel: Any, rows: int, tiles: Tiles, qkv: Tensor, *given: object) -> None:
    """Run the Triton function `kernel` with these arguments, in order: `qkv` [s, b, n, 3, d], the
    arguments `given`, the sizes s, b, n and d, the queries and keys of `tiles`, and the two numbers
    from `parts_of`. There is a program for every `rows` queries or keys (first axis of the grid) of
    every head of every sequence (second axis), with the warps and stages of `tiles`. Nothing is
    returned: the kernel writes its results to tensors among the arguments."""
    s, b, n, _, d = qkv.shape
    kernel[triton.cdiv(s, rows), b * n](
        qkv,
        *given,
        s,
        b,
        n,
        d,
        tiles.queries,
        tiles.keys,
        *parts_of(d, qkv.dtype),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


@triton.jit
def _draw(keys, bits, first_row, threshold, s, n, r: tl.constexpr):
    """Kernel: write to `bits`, bytes [b·n, s, 16 · blocks of 128 attention keys], one bit for each
    softmax weight of one head, for `r` queries and 128 attention keys: 1 if the weight is not
    dropped, by `keys`, a dropout key per sequence, `first_row` and `threshold`, as `mask_arguments`
    gives them. The grid is [groups of `r` queries, blocks of 128 attention keys, b·n]. Tiles whose
    attention keys are all later than the queries are not written."""
    group = tl.program_id(2)
    start = tl.program_id(0) * r
    if tl.program_id(1) * 128 < start + r:
        query = start + tl.arange(0, r)
        # One key for all rows of a head, as `packed` takes a key for each row.
        key = tl.load(keys + group // n) + query.to(tl.int64) * 0
        drawn = packed(key, first_row + group % n * s + query, tl.program_id(1), threshold)
        at = (group.to(tl.int64) * s + query[:, None]) * (tl.num_programs(1) * 16)
        at += tl.program_id(1) * 16 + tl.arange(0, 16)[None, :]
        tl.store(bits + at, drawn, query[:, None] < s)


@triton.jit
def _part(base, first, stride, s, r: tl.constexpr, d: tl.constexpr, w: tl.constexpr):
    """Return a pair of tensors [r, w] for `r` rows of one head, from row number `first` on, and
    columns 0 to `w` - 1 of these rows. The first tensor has the elements' addresses: rows and
    columns are numbered from `base`, the address of column 0 in row 0, and rows lie `stride`
    elements apart. The second is boolean: True if the row's number is below `s` and the column's is
    below `d`. From `base` on, the head has `s` rows and `d` columns."""
    row = tl.arange(0, r)[:, None]
    column = tl.arange(0, w)[None, :]
    return base + tl.cast(first, tl.int64) * stride + (row * stride + column), (row < s - first) & (
        column < d
    )


@triton.jit
def _tile(
    base, first, stride, s, r: tl.constexpr, d: tl.constexpr, w: tl.constexpr, v: tl.constexpr
):
    """Load `r` rows of one head, [s, d], from row number `first` on, where row 0 lies at `base` and
    rows lie `stride` elements apart. Return a pair of tensors, the rows' columns 0 to `w` - 1,
    [r, w], and the next `v` columns, [r, v]. Rows and columns that the head lacks, numbers from `s`
    and `d` on, are zero. If `v` is 0, the second tensor is the first once more."""
    at, inside = _part(base, first, stride, s, r, d, w)
    tile = tl.load(at, inside, 0.0)
    rest = tile
    if v:
        at, inside = _part(base + w, first, stride, s, r, d - w, v)
        rest = tl.load(at, inside, 0.0)
    return tile, rest


@triton.jit
def _put(
    base,
    first,
    stride,
    tile,
    factor,
    s,
    r: tl.constexpr,
    d: tl.constexpr,
    w: tl.constexpr,
    v: tl.constexpr,
):
    """Store `tile`, a tile of one head given as two parts [r, w] and [r, v] like those of `_tile`,
    times `factor`, in the rows from `first` on of the memory at `base`, where rows lie `stride`
    elements apart. If v is 0, the second part is not stored. Rows and columns that the head,
    [s, d], lacks are not written."""
    at, inside = _part(base, first, stride, s, r, d, w)
    tl.store(at, tile[0] * factor, inside)
    if v:
        at, inside = _part(base + w, first, stride, s, r, d - w, v)
        tl.store(at, tile[1] * factor, inside)


@triton.jit
def _zeros(r: tl.constexpr, w: tl.constexpr, v: tl.constexpr):
    # A column stands for no second part, because Triton has no empty tensors.
    return tl.zeros([r, w], tl.float32), tl.zeros([r, v if v else 1], tl.float32)


@triton.jit
def _along(a, b, v: tl.constexpr):
    """Return the matrix product a · bᵀ of two tiles, each a pair of the parts of a head, summed
    over both parts: a tensor [rows of a, rows of b] in fp32. If v is 0, only the first parts
    count."""
    # Not TF32, which would leave fp32 heads ten bits.
    product = tl.dot(a[0], tl.trans(b[0]), input_precision="ieee")
    if v:
        product = tl.dot(a[1], tl.trans(b[1]), product, input_precision="ieee")
    return product


@triton.jit
def _add(total, weights, tile, v: tl.constexpr):
    """Return total + weights @ tile as a pair. `total` and `tile` are pairs too, one tensor for
    each part of the head; `weights` is one tensor, and its matrix product with each tensor of
    `tile` is added to the tensor of `total` for the same part. If v, the number of columns in the
    second part, is 0, the second tensor of `total` is returned unchanged."""
    first = tl.dot(weights, tile[0], total[0], input_precision="ieee")
    second = total[1]
    if v:
        second = tl.dot(weights, tile[1], second, input_precision="ieee")
    return first, second


@triton.jit
def _stays(bits, group, query, key, s):
    """Return a boolean tensor, True where a softmax weight is not dropped, by the `bits` that
    `_draw` wrote for head `group`, counted over all sequences of `s` positions each. `query` is a
    column of numbers and `key` a row, or the reverse; the result has an element for each pair of a
    query and a key."""
    row = (s + 127) // 128 * 16
    # Rows beyond the sequence read the bits of the last one; nothing of them is stored.
    at = tl.minimum(query, s - 1) * row + key // 128 * 16 + key % 16
    return (
        tl.load(bits + group.to(tl.int64) * s * row + at) >> (key % 128 // 16).to(tl.uint8)
    ) & 1 != 0


@triton.jit
def _forward(
    qkv,
    context,
    sums,
    bits,
    keep_scale,
    scale,
    s,
    b,
    n,
    d: tl.constexpr,
    m: tl.constexpr,
    c: tl.constexpr,
    w: tl.constexpr,
    v: tl.constexpr,
):
    # The last queries first: they see the most keys and take longest, and short programs fill the
    # end.
    group = tl.program_id(1)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * m
    stride = b * n * 3 * d
    base = qkv + group.to(tl.int64) * 3 * d
    query = first + tl.arange(0, m)
    q = _tile(base, first, stride, s, m, d, w, v)
    # Exponentials to the base 2, which a GPU has as an instruction.
    scale = scale * LOG2_E
    top = tl.full([m], float("-inf"), tl.float32)
    total = tl.zeros([m], tl.float32)
    mixed = _zeros(m, w, v)
    # Keys before it are visible to every query of the tile.
    edge = (first + 1) // c * c
    # Twice, so that only the tiles at the edge, where a key may be later than its query, are
    # masked.
    for is_edge in tl.static_range(2):
        for start in range(is_edge * edge, tl.minimum(first + m, s) if is_edge else edge, c):
            key = start + tl.arange(0, c)
            keys = _tile(base + d, start, stride, s, c, d, w, v)
            values = _tile(base + 2 * d, start, stride, s, c, d, w, v)
            scores = _along(q, keys, v) * scale
            if is_edge:
                scores = tl.where(key[None, :] <= query[:, None], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            # A higher maximum shrinks what was added before it.
            weights = tl.exp2(scores - higher[:, None])
            fade = tl.exp2(top - higher)
            total = total * fade + tl.sum(weights, 1)
            weights = tl.where(
                _stays(bits, group, query[:, None], key[None, :], s), weights, 0.0
            ).to(values[0].dtype)
            mixed = _add((mixed[0] * fade[:, None], mixed[1] * fade[:, None]), weights, values, v)
            top = higher
    _put(
        context + group.to(tl.int64) * d,
        first,
        b * n * d,
        mixed,
        (keep_scale / total)[:, None],
        s,
        m,
        d,
        w,
        v,
    )
    tl.store(sums + group.to(tl.int64) * s + query, top + tl.log2(total), query < s)


@triton.jit
def _to_query(
    qkv,
    gradient,
    context,
    qkv_gradient,
    sums,
    inners,
    bits,
    keep_scale,
    scale,
    s,
    b,
    n,
    d: tl.constexpr,
    m: tl.constexpr,
    c: tl.constexpr,
    w: tl.constexpr,
    v: tl.constexpr,
):
    """Kernel: write the gradient of `m` queries of one head to `qkv_gradient` [s, b, n, 3, d], and
    to `inners` [b·n, s] for each query the inner product of its output, from `context`, and the
    output's gradient, from `gradient`, both [s, b, n·d]. `_to_key_value` reads `inners`. `sums`
    [b·n, s] comes from `_forward`, in logarithms to the base 2, and `bits` from `_draw`."""
    group = tl.program_id(1)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * m
    stride = b * n * 3 * d
    base = qkv + group.to(tl.int64) * 3 * d
    at = group.to(tl.int64) * s
    query = first + tl.arange(0, m)
    head = group.to(tl.int64) * d
    q = _tile(base, first, stride, s, m, d, w, v)
    given = _tile(gradient + head, first, b * n * d, s, m, d, w, v)
    output = _tile(context + head, first, b * n * d, s, m, d, w, v)
    inner = tl.sum(given[0].to(tl.float32) * output[0].to(tl.float32), 1)
    if v:
        inner += tl.sum(given[1].to(tl.float32) * output[1].to(tl.float32), 1)
    tl.store(inners + at + query, inner, query < s)
    # Infinity for rows beyond the sequence, so that their weights are 0.
    log_sum = tl.load(sums + at + query, query < s, float("inf"))
    total = _zeros(m, w, v)
    edge = (first + 1) // c * c
    for is_edge in tl.static_range(2):
        for start in range(is_edge * edge, tl.minimum(first + m, s) if is_edge else edge, c):
            key = start + tl.arange(0, c)
            keys = _tile(base + d, start, stride, s, c, d, w, v)
            values = _tile(base + 2 * d, start, stride, s, c, d, w, v)
            weights = tl.exp2(_along(q, keys, v) * (scale * LOG2_E) - log_sum[:, None])
            if is_edge:
                weights = tl.where(key[None, :] <= query[:, None], weights, 0.0)
            slopes = _along(given, values, v) * keep_scale
            slopes = (
                tl.where(_stays(bits, group, query[:, None], key[None, :], s), slopes, 0.0)
                - inner[:, None]
            )
            total = _add(total, (weights * slopes).to(keys[0].dtype), keys, v)
    _put(qkv_gradient + group.to(tl.int64) * 3 * d, first, stride, total, scale, s, m, d, w, v)


@triton.jit
def _to_key_value(
    qkv,
    gradient,
    context,
    qkv_gradient,
    sums,
    inners,
    bits,
    keep_scale,
    scale,
    s,
    b,
    n,
    d: tl.constexpr,
    m: tl.constexpr,
    c: tl.constexpr,
    w: tl.constexpr,
    v: tl.constexpr,
):
    group = tl.program_id(1)
    start = tl.program_id(0) * c
    stride = b * n * 3 * d
    base = qkv + group.to(tl.int64) * 3 * d
    key = start + tl.arange(0, c)
    keys = _tile(base + d, start, stride, s, c, d, w, v)
    values = _tile(base + 2 * d, start, stride, s, c, d, w, v)
    to_key = _zeros(c, w, v)
    to_value = _zeros(c, w, v)
    for row in range(start // m * m, s, m):
        query = row + tl.arange(0, m)
        at = group.to(tl.int64) * s
        q = _tile(base, row, stride, s, m, d, w, v)
        given = _tile(gradient + group.to(tl.int64) * d, row, b * n * d, s, m, d, w, v)
        log_sum = tl.load(sums + at + query, query < s, float("inf"))
        inner = tl.load(inners + at + query, query < s, 0.0)
        weights = tl.exp2(_along(keys, q, v) * (scale * LOG2_E) - log_sum[None, :])
        weights = tl.where(key[:, None] <= query[None, :], weights, 0.0)
        stays = _stays(bits, group, query[None, :], key[:, None], s)
        to_value = _add(to_value, tl.where(stays, weights, 0.0).to(q[0].dtype), given, v)
        slopes = weights * (
            tl.where(stays, _along(values, given, v) * keep_scale, 0.0) - inner[None, :]
        )
        to_key = _add(to_key, slopes.to(q[0].dtype), q, v)
    out = qkv_gradient + group.to(tl.int64) * 3 * d
    _put(out + d, start, stride, to_key, scale, s, c, d, w, v)
    _put(out + 2 * d, start, stride, to_value, keep_scale, s, c, d, w, v)
