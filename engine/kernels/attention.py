"""Attention: scale, mask, softmax, dropout and the two products around them.

Shapes: s sequence, b microbatch, n heads, d head dim. Row head · s + query of the dropout mask
belongs to a query.
"""

import math
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy import float32
from torch import Tensor

from mlm_repro.engine.compiled import (
    BLOCK,
    Array,
    Compiled,
    array,
    exponential,
    largest,
    load,
    random_bits,
    store,
)
from mlm_repro.engine.kernels.dropout import DropoutMask, mask_keys
from mlm_repro.engine.kernels.products import widened

QUERY_BYTES = 256
"""Bytes of one key's scores in a block of scores, which limits the number of queries in the
block."""
WORKSPACE_BYTES = 2 << 20
"""Approximate size of a block of scores in bytes, small enough for the cache."""


def reference(query_key_value: Tensor, mask: DropoutMask | None) -> Tensor:
    """Return causal attention's outputs of all heads, [s, b, n·d], differentiable, from one tensor
    of queries, keys and values, [s, b, n, 3, d]. Scores are multiplied by 1/√d. `mask`, a
    DropoutMask that describes the masks and has no tensor of them, drops softmax weights and scales
    the others; None means no dropout."""
    s, b, n, _, d = query_key_value.shape
    query, key, value = query_key_value.permute(3, 1, 2, 0, 4).unbind(0)  # each [b, n, s, d]
    if mask is None:
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    else:
        # Scaling the query is less work than scaling the scores, [s, d] against [s, s].
        scores = torch.matmul(query * (1.0 / math.sqrt(d)), key.transpose(-1, -2))  # [b, n, s, s]
        weights = masked_softmax(scores, 1.0)
        factors = mask.factors(n * s, s, query.device, weights.dtype).view(b, n, s, s)
        context = torch.matmul(weights * factors, value)
    return context.permute(2, 0, 1, 3).reshape(s, b, n * d)


def masked_softmax(scores: Tensor, scale: float, visible: Tensor | None = None) -> Tensor:
    """Return the softmax over k keys of scores × scale, [b, n, s, k] as the scores, computed in
    fp32 (fp64 in fp64) from the product in the scores' dtype, and rounded to that dtype. The 2021
    paper fuses it into one kernel.

    Without `visible` the mask is causal, with the last query seeing every key; otherwise a key is
    seen where `visible` [b, 1, s or 1, k] is True. A query without any key gives NaN.
    """
    s, k = scores.shape[-2:]
    if visible is None:
        visible = torch.ones(s, k, dtype=torch.bool, device=scores.device).tril_(k - s)
    work = scores.dtype if scores.dtype == torch.float64 else torch.float32
    scaled = scores if scale == 1 else scores * scale
    return torch.softmax(scaled.masked_fill(~visible, float("-inf")), dim=-1, dtype=work).to(
        scores.dtype
    )


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, mask: DropoutMask | None) -> Tensor:
        s, b, n, _, d = qkv.shape
        # Ordered by head once, for backward too. bf16 that this processor cannot multiply is
        # widened here and not in every block, 49 ms instead of 69 for 1,024 tokens of 12 heads on a
        # Zen 3; it is kept as bf16.
        by_head = _by_head(qkv).contiguous()
        query, key, value = widened(by_head)
        arguments = n, s, float32(1.0 / math.sqrt(d)), *mask_keys(mask)
        context = qkv.new_empty(s, b * n, d)
        sums = torch.empty(b * n, s)
        for heads, queries, keys in _blocks(s, b * n, query.element_size()):
            scores = query[heads, queries] @ key[heads, keys].transpose(1, 2)
            factor = scores.new_empty(scores.shape[:2], dtype=torch.float32)
            _softmax(
                array(scores), heads.start, queries.start, *arguments, array(factor), array(sums)
            )
            # The product takes exponentials as they are; dividing outputs by their sum is d
            # divisions a query, not one for each key.
            mixed = scores @ value[heads, keys]
            torch.mul(mixed.transpose(0, 1), factor.t().unsqueeze(2), out=context[queries, heads])
        ctx.save_for_backward(by_head, context, sums)
        ctx.arguments = arguments
        ctx.shape = qkv.shape
        return context.view(s, b, n * d)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        by_head, context, sums = ctx.saved_tensors
        query, key, value = widened(by_head)
        s, b, n, _, d = ctx.shape
        gradient = gradient.contiguous().view(s, b * n, d)
        # A query's Σ weight · slope, which is its output times the output's gradient: no pass over
        # the scores.
        inner = torch.linalg.vecdot(gradient.float(), context.float()).t().contiguous()  # [b·n, s]
        gradient = widened(gradient.transpose(0, 1).contiguous())
        qkv_gradient = by_head.new_empty(ctx.shape)
        to_query, to_key, to_value = _by_head(qkv_gradient)
        key_sum = value_sum = torch.empty(0)
        for heads, queries, keys in reversed(_blocks(s, b * n, query.element_size())):
            here = query[heads, queries], gradient[heads, queries]
            weights = here[0] @ key[heads, keys].transpose(1, 2)
            slopes = here[1] @ value[heads, keys].transpose(1, 2)
            _softmax_gradient(
                array(weights),
                array(slopes),
                heads.start,
                queries.start,
                *ctx.arguments,
                array(sums),
                array(inner),
            )
            to_value_here = weights.transpose(1, 2) @ here[1]
            to_key_here = slopes.transpose(1, 2) @ here[0]
            # The last queries come first and see all keys, so their terms begin the sums and no
            # zeros have to be written.
            if queries.stop == s:
                value_sum = to_value_here.float()
                key_sum = to_key_here.float()
            else:
                value_sum[:, keys] += to_value_here
                key_sum[:, keys] += to_key_here
            to_query[heads, queries] = slopes @ key[heads, keys]
            if queries.start == 0:
                to_key[heads] = key_sum
                to_value[heads] = value_sum
        return qkv_gradient, None


blocked = _Blocked.apply
"""Differentiable function (queries, keys and values in one tensor [s, b, n, 3, d], DropoutMask or
None) → causal attention's outputs of all heads, [s, b, n·d], on CPUs. It computes one block of
queries at a time.

Inputs, outputs and one number per query are kept. Backward recomputes scores and dropout mask (Dao
et al. 2022, arXiv 2205.14135).
"""


def _by_head(qkv: Tensor) -> Tensor:
    """Return a view [3, b·n, s, d] of `qkv` [s, b, n, 3, d]: the queries, the keys and the values,
    each with the n heads of the first sequence, then the n heads of the second, and so on."""
    return qkv.flatten(1, 2).permute(2, 1, 0, 3)


def _blocks(s: int, heads: int, element_size: int) -> list[tuple[slice, slice, slice]]:
    """Return a list of the blocks that attention computes one by one, by ascending heads and then
    queries, each as three slices: of the `heads`, counted over all sequences, of the s queries, and
    of the keys up to the last of these queries. A block of scores, of `element_size` bytes each,
    has about 2 MiB, or more if one head's queries need it."""
    # A block's keys end with its last query: the shorter it is, the fewer products are of later
    # keys.
    at_once = QUERY_BYTES // element_size
    together = max(WORKSPACE_BYTES // (min(at_once, s) * s * element_size), 1)
    return [
        (
            slice(head, min(head + together, heads)),
            slice(query, min(query + at_once, s)),
            slice(min(query + at_once, s)),
        )
        for head, query in product(range(0, heads, together), range(0, s, at_once))
    ]


@Compiled
def _softmax(
    scores: Array,
    first_head: int,
    first_query: int,
    n: int,
    s: int,
    scale: float32,
    keys: Array,
    first_row: int,
    threshold: np.int32,
    keep_scale: float32,
    factor: Array,
    sums: Array,
) -> None:
    """Turn `scores`, a block of scores [heads, queries, keys] in fp32 or bits of bf16, not yet
    multiplied by `scale`, in place into the exponentials of their distances from the row's largest
    score, 0 for a key after the query and for a dropped weight. The block begins at head
    `first_head`, counted over all sequences of `n` heads each, and query `first_query`, in
    sequences of `s` positions.

    `factor` [heads, queries] receives the number that turns a row of exponentials into weights
    after dropout, and `sums` [b·n, s] the log of each row's sum of exp(score · scale), before
    dropout and without a largest score taken off.
    `keys`, with a dropout key per sequence, and the three arguments after it are the mask as
    `mask_keys` gives it; without dropout `keys` is empty.
    """
    count = scores.shape[2]
    bits = np.zeros((count + BLOCK - 1) // BLOCK * BLOCK, dtype=np.uint16)
    for g in range(scores.shape[0]):
        sample = (first_head + g) // n
        head = (first_head + g) % n
        for r in range(scores.shape[1]):
            row = scores[g, r]
            query = first_query + r
            seen = query + 1
            top = largest(row, seen) * scale
            total = float32(0.0)
            if keys.size > 0:
                random_bits(keys[sample], first_row + head * s + query, seen, bits)
            for i in range(seen):
                value = exponential(load(row, i) * scale - top)
                keep = float32(1.0) if np.int32(bits[i]) >= threshold else float32(0.0)
                # Before dropout, because dropout is on weights that sum to one.
                total += value
                store(row, i, value * keep)
            for i in range(seen, count):
                store(row, i, float32(0.0))
            factor[g, r] = keep_scale / total
            sums[first_head + g, query] = top + np.log(total)


@Compiled
def _softmax_gradient(
    weights: Array,
    slopes: Array,
    first_head: int,
    first_query: int,
    n: int,
    s: int,
    scale: float32,
    keys: Array,
    first_row: int,
    threshold: np.int32,
    keep_scale: float32,
    sums: Array,
    inner: Array,
) -> None:
    """Turn the scores in `weights`, not yet multiplied by `scale`, into weights after dropout, and
    the gradient of these weights in `slopes` into the gradient of the unscaled scores, both in
    place, [heads, queries, keys] in fp32 or bits of bf16; both become 0 at keys after the query.
    The block begins at head `first_head`, counted over all sequences of `n` heads each, and query
    `first_query`.

    `sums` [b·n, s] has the log of each row's sum of exponentials, from `_softmax`; `inner` [b·n, s]
    each query's output times the output's gradient. `keys`, with a dropout key per sequence, and
    the three arguments after it are the mask as `mask_keys` gives it; without dropout `keys` is
    empty.
    """
    count = weights.shape[2]
    bits = np.zeros((count + BLOCK - 1) // BLOCK * BLOCK, dtype=np.uint16)
    for g in range(weights.shape[0]):
        sample = (first_head + g) // n
        head = (first_head + g) % n
        for r in range(weights.shape[1]):
            row = weights[g, r]
            slope = slopes[g, r]
            query = first_query + r
            seen = query + 1
            log_sum = sums[first_head + g, query]
            mean = inner[first_head + g, query]
            if keys.size > 0:
                random_bits(keys[sample], first_row + head * s + query, seen, bits)
            for i in range(seen):
                # From the sum's logarithm, so that a query keeps one number instead of a maximum
                # and a sum.
                weight = exponential(load(row, i) * scale - log_sum)
                keep = keep_scale if np.int32(bits[i]) >= threshold else float32(0.0)
                store(slope, i, weight * (load(slope, i) * keep - mean) * scale)
                store(row, i, weight * keep)
            for i in range(seen, count):
                store(row, i, float32(0.0))
                store(slope, i, float32(0.0))
