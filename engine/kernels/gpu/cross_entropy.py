"""Triton kernels for the logits of the chunked output projection and cross-entropy. A program has
one row."""

import triton
import triton.language as tl
from torch import Tensor

from mlm_repro.engine.kernels.cross_entropy import LogitLoops, VocabAxis, in_chunks

ROW_BYTES = 8192
"""Bytes of a row of logits that a program of the GPU kernel reads at a time."""
CHUNK_BYTES = 1 << 30
"""Largest size of a block of logits in a GPU's memory, in bytes: ten thousand positions of GPT-2's
vocabulary. The weight's gradient is added up in fp32 over the blocks, which takes longer than a
block's softmax."""


def chunked(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    axis: VocabAxis,
) -> Tensor:
    """Return the mean cross-entropy of targets [n], ids in the whole vocabulary, as a scalar in
    fp32, on a GPU, from hidden states [n, h] and this rank's rows of the output weight, [v/t, h];
    rows at or above `vocab_size`, counted over all ranks, are padding. Every target must be an id
    below `vocab_size`: a negative one is not ignored, and its loss has no meaning. Every rank of
    `axis` calls it.

    Gradients are computed along with the loss, and backward scales them in place, so it can run
    only once. On an axis of several ranks the gradient of `hidden` is this rank's part of a sum.
    """
    return in_chunks(
        hidden,
        weight,
        targets,
        vocab_size,
        axis,
        LogitLoops(log_sum, softmax_gradient, CHUNK_BYTES),
    )


def log_sum(
    logits: Tensor,
    columns: int,
    targets: Tensor,
    top: Tensor,
    sums: Tensor,
    factor: float,
    is_whole: bool,
) -> None:
    """Write each row's largest logit to `top` [n], and to `sums` [2, n] Σ exp(logit − top) and the
    logit of the row's target, 0 if the row does not have it; `top` and `sums` are in fp32.
    `targets` [n] are counted from this rank's first column; another rank's target is negative or
    not below `columns`.

    The rows of `logits` [n, v/t] have `columns` real logits; the rest is padding. If `factor` is
    above 0 and rows have the whole vocabulary (`is_whole`), they are overwritten by `factor` × the
    loss's gradient, and padding by 0; otherwise the logits stay.
    """
    _log_sum[(len(logits),)](
        logits,
        targets,
        top,
        sums,
        columns,
        *logits.shape,
        factor,
        is_whole and factor > 0.0,
        ROW_BYTES // logits.element_size(),
        num_warps=8,
    )


def softmax_gradient(
    logits: Tensor,
    columns: int,
    targets: Tensor,
    own_top: Tensor,
    top: Tensor,
    sums: Tensor,
    factor: float,
) -> None:
    """Turn logits [n, v/t], with `columns` real ones in a row, into `factor` × (softmax − 1 at the
    target), and padding into 0, in place. `top` [n] and `sums` [2, n], as `log_sum` writes them,
    are over all ranks; the second row of `sums` and `own_top` are not read. `targets` [n] are
    counted from this rank's first column; another rank's target is negative or not below
    `columns`."""
    _softmax_gradient[(len(logits),)](
        logits,
        targets,
        top,
        sums,
        columns,
        logits.size(1),
        factor,
        ROW_BYTES // logits.element_size(),
        num_warps=8,
    )


@triton.jit
def _log_sum(
    logits, targets, top, own, columns, n, v, factor, has_factor: tl.constexpr, c: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    most = tl.full([c], float("-inf"), tl.float32)
    total = tl.zeros([c], tl.float32)
    for start in range(0, columns, c):
        column = start + tl.arange(0, c)
        value = tl.load(logits + row * v + column, column < columns, float("-inf")).to(tl.float32)
        higher = tl.where(value > most, value, most)
        # A NaN is never greater; taken over here, it reaches the loss.
        higher = tl.where(value == value, higher, value)
        # −∞ less −∞ would be NaN where a column is padding throughout.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(most - shift) + tl.exp(value - shift)
        most = higher
    largest = tl.max(most, 0)
    total = tl.sum(total * tl.exp(most - tl.where(largest == float("-inf"), 0.0, largest)), 0)
    is_here = (target >= 0) & (target < columns)
    logit = tl.load(logits + row * v + target, is_here, 0.0).to(tl.float32)
    tl.store(top + row, largest)
    tl.store(own + row, total)
    tl.store(own + n + row, logit)
    if has_factor:
        # Every thread has to have read the row before any overwrites it.
        tl.debug_barrier()
        _row_gradient(logits + row * v, target, columns, v, largest, total, factor, c)


@triton.jit
def _softmax_gradient(logits, targets, top, totals, columns, v, factor, c: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _row_gradient(
        logits + row * v,
        tl.load(targets + row),
        columns,
        v,
        tl.load(top + row),
        tl.load(totals + row),
        factor,
        c,
    )


@triton.jit
def _row_gradient(row, target, columns, v, top, total, factor, c: tl.constexpr):
    # By maximum and sum, not by their logarithm, which would round the difference of two large
    # numbers.
    share = factor / total
    for start in range(0, v, c):
        column = start + tl.arange(0, c)
        value = tl.load(row + column, column < columns, float("-inf")).to(tl.float32)
        slope = tl.exp(value - top) * share - tl.where(column == target, factor, 0.0)
        tl.store(row + column, tl.where(column < columns, slope, 0.0), column < v)
