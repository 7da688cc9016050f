"""Attention: scale, mask, softmax, dropout and the two products around them.

Shapes: s sequence, b microbatch, n heads, d head dim. Row head · s + query of the dropout mask belongs to a query.
"""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from engine.compiled import BLOCK, Array, Compiled, array, exponential, inline, largest, load, random_bits, store
from engine.kernels.dropout import DropoutMask, mask_keys
from engine.parallel.layers import widened

QUERY_BYTES = 256
"""Bytes of one key's scores in a block of queries."""
WORKSPACE_BYTES = 2 << 20
"""Approximate bytes of the scores of a block of queries, small enough for the cache."""


def reference(
    query_key_value: torch.Tensor, mask: DropoutMask | None, visible: torch.Tensor | None = None
) -> torch.Tensor:
    """Outputs of all heads, [s, b, n·d], from queries, keys and values [s, b, n, 3, d].

    Attention is causal, or over the keys where `visible` [b, s, s] is True. A query without any gives NaN.
    """
    s, b, n, _, d = query_key_value.shape
    query, key, value = query_key_value.permute(3, 1, 2, 0, 4).unbind(0)  # each [b, n, s, d]
    seen = visible.unsqueeze(1) if visible is not None else None
    if mask is None:
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, is_causal=seen is None)
    else:
        if seen is None:
            seen = torch.ones(s, s, dtype=torch.bool, device=query.device).tril_()
        scores = torch.matmul(query * (1.0 / math.sqrt(d)), key.transpose(-1, -2))  # [b, n, s, s]
        work = scores.dtype if scores.dtype == torch.float64 else torch.float32
        weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1, dtype=work).to(scores.dtype)
        factors = mask.factors(n * s, s, query.device, weights.dtype).view(b, n, s, s)
        context = torch.matmul(weights * factors, value)
    return context.permute(2, 0, 1, 3).reshape(s, b, n * d)


def blocked(
    query_key_value: torch.Tensor, mask: DropoutMask | None, visible: torch.Tensor | None = None
) -> torch.Tensor:
    """The same, one block of queries at a time. A query without any key gives 0.

    One number per query is kept. Backward recomputes scores and dropout mask (Dao et al. 2022, arXiv 2205.14135).
    """
    context: torch.Tensor = _Blocked.apply(query_key_value, mask, visible)
    return context


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, mask: DropoutMask | None, visible: torch.Tensor | None) -> torch.Tensor:
        s, b, n, _, d = qkv.shape
        each = _by_head(qkv).contiguous()
        query, key, value = widened(each)
        rows = _Rows(mask, visible, n, s, d)
        context = qkv.new_empty(s, b * n, d)
        sums = torch.empty(b * n, s)
        for heads, queries, keys in rows.blocks(b * n, query.element_size()):
            scores = query[heads, queries] @ key[heads, keys].transpose(1, 2)
            factor = scores.new_empty(scores.shape[:2], dtype=torch.float32)
            _softmax(array(scores), heads.start, queries.start, *rows.arguments, array(factor), array(sums))
            mixed = scores @ value[heads, keys]
            torch.mul(mixed.transpose(0, 1), factor.t().unsqueeze(2), out=context[queries, heads])
        ctx.save_for_backward(each, context, sums)
        ctx.rows, ctx.shape = rows, qkv.shape
        return context.view(s, b, n * d)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        each, context, sums = ctx.saved_tensors
        query, key, value = widened(each)
        s, b, n, _, d = ctx.shape
        gradient = gradient.contiguous().view(s, b * n, d)
        inner = torch.linalg.vecdot(gradient.float(), context.float()).t().contiguous()  # [b·n, s]
        gradient = widened(gradient.transpose(0, 1).contiguous())
        qkv_gradient = each.new_empty(ctx.shape)
        to_query, to_key, to_value = _by_head(qkv_gradient)
        key_sum = value_sum = torch.empty(0)
        for heads, queries, keys in reversed(ctx.rows.blocks(b * n, query.element_size())):
            here = query[heads, queries], gradient[heads, queries]
            weights = here[0] @ key[heads, keys].transpose(1, 2)
            slopes = here[1] @ value[heads, keys].transpose(1, 2)
            _softmax_gradient(
                array(weights), array(slopes), heads.start, queries.start, *ctx.rows.arguments, array(sums),
                array(inner),
            )  # fmt: skip
            to_value_here = weights.transpose(1, 2) @ here[1]
            to_key_here = slopes.transpose(1, 2) @ here[0]
            if queries.stop == s:  # the last queries, which come first, see all keys
                value_sum, key_sum = to_value_here.float(), to_key_here.float()
            else:
                value_sum[:, keys] += to_value_here
                key_sum[:, keys] += to_key_here
            to_query[heads, queries] = slopes @ key[heads, keys]
            if queries.start == 0:
                to_key[heads], to_value[heads] = key_sum, value_sum
        return qkv_gradient, None, None


def _by_head(qkv: torch.Tensor) -> torch.Tensor:
    """A view of [s, b, n, 3, d] as queries, keys and values, [3, b·n, s, d]."""
    return qkv.flatten(1, 2).permute(2, 1, 0, 3)


class _Rows:
    """Scale, mask and dropout of rows of scores, as arguments of the compiled loops."""

    def __init__(self, mask: DropoutMask | None, visible: torch.Tensor | None, n: int, s: int, d: int) -> None:
        self.s, self.is_causal = s, visible is None
        shown = np.empty((0, 0, 0), dtype=np.bool_) if visible is None else array(visible.contiguous())
        self.arguments = (s, n, np.float32(1.0 / math.sqrt(d)), shown, *mask_keys(mask))

    def blocks(self, heads: int, element_size: int) -> list[tuple[slice, slice, slice]]:
        """Slices of heads, of queries and of the keys they may see."""
        at_once = QUERY_BYTES // element_size
        together = max(WORKSPACE_BYTES // (min(at_once, self.s) * self.s * element_size), 1)
        blocks = []
        for head in range(0, heads, together):
            for query in range(0, self.s, at_once):
                last = min(query + at_once, self.s)
                seen = slice(0, last if self.is_causal else self.s)
                blocks.append((slice(head, min(head + together, heads)), slice(query, last), seen))
        return blocks


@inline
def _hide(row: Array, visible: Array, sample: int, query: int) -> int:
    """Number of leading scores that count for a query. Scores of hidden keys among them become −∞."""
    if visible.shape[0] == 0:
        return query + 1
    for i in range(row.size):
        if not visible[sample, query, i]:
            store(row, i, np.float32(-np.inf))
    return int(row.size)


@Compiled
def _softmax(
    scores: Array, first_head: int, first_query: int, s: int, n: int, scale: np.float32, visible: Array,
    keys: Array, first_row: int, threshold: np.int32, keep_scale: np.float32, factor: Array, sums: Array,
) -> None:  # fmt: skip
    """Scores [heads, queries, keys] → exponentials, 0 if hidden or dropped. Each row times its `factor` sums to one.

    `sums` [b·n, s] receives the log of the sum of exponentials.
    """
    count = scores.shape[2]
    bits = np.zeros((count + BLOCK - 1) // BLOCK * BLOCK, dtype=np.uint16)
    for g in range(scores.shape[0]):
        sample, head = (first_head + g) // n, (first_head + g) % n
        for r in range(scores.shape[1]):
            row, query = scores[g, r], first_query + r
            seen = _hide(row, visible, sample, query)
            top = largest(row, seen) * scale
            total = np.float32(0.0)
            if top == np.float32(-np.inf):
                seen = 0
            if keys.size > 0:
                random_bits(keys[sample], first_row + head * s + query, seen, bits)
            for i in range(seen):
                value = exponential(load(row, i) * scale - top)
                keep = np.float32(1.0) if np.int32(bits[i]) >= threshold else np.float32(0.0)
                total += value
                store(row, i, value * keep)
            for i in range(seen, count):
                store(row, i, np.float32(0.0))
            factor[g, r] = keep_scale / total if seen > 0 else np.float32(0.0)
            sums[first_head + g, query] = top + np.log(total) if seen > 0 else np.float32(np.inf)


@Compiled
def _softmax_gradient(
    weights: Array, slopes: Array, first_head: int, first_query: int, s: int, n: int, scale: np.float32,
    visible: Array, keys: Array, first_row: int, threshold: np.int32, keep_scale: np.float32, sums: Array, inner: Array,
) -> None:  # fmt: skip
    """Turn scores into weights after dropout, and their gradient into that of the unscaled scores, in place."""
    count = weights.shape[2]
    bits = np.zeros((count + BLOCK - 1) // BLOCK * BLOCK, dtype=np.uint16)
    for g in range(weights.shape[0]):
        sample, head = (first_head + g) // n, (first_head + g) % n
        for r in range(weights.shape[1]):
            row, slope, query = weights[g, r], slopes[g, r], first_query + r
            seen = _hide(row, visible, sample, query)
            log_sum, mean = sums[first_head + g, query], inner[first_head + g, query]
            if keys.size > 0:
                random_bits(keys[sample], first_row + head * s + query, seen, bits)
            for i in range(seen):
                weight = exponential(load(row, i) * scale - log_sum)
                keep = keep_scale if np.int32(bits[i]) >= threshold else np.float32(0.0)
                store(slope, i, weight * (load(slope, i) * keep - mean) * scale)
                store(row, i, weight * keep)
            for i in range(seen, count):
                store(row, i, np.float32(0.0))
                store(slope, i, np.float32(0.0))
