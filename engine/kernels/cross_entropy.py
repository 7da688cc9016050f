"""Output projection and cross-entropy over a vocabulary divided over the tensor-parallel axis.

Shapes: n positions, h hidden, v padded vocabulary, t tensor-parallel ranks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from mlm_repro.engine.compiled import Array, Compiled, array, exponential, largest, load, store
from mlm_repro.engine.kernels import registry
from mlm_repro.engine.kernels.products import linear, multiply

CHUNK_BYTES = 1 << 27
"""Largest size of a block of logits in memory on a CPU, in bytes."""
HALF_SCALE = 2.0**15
"""Factor by which gradients of logits, between −1 and 1, are multiplied when they are stored in
fp16, so that small ones do not underflow."""


class VocabAxis(Protocol):
    """Interface of the axis over which the vocabulary is divided: `size`, `rank` and `all_reduce`,
    the parts of `Axis` that a loss needs."""

    @property
    def size(self) -> int:
        """Number of ranks along the axis."""

    @property
    def rank(self) -> int:
        """This rank's index along the axis, from 0: the number of the part of the vocabulary that
        it holds."""

    def all_reduce(self, tensor: Tensor, op: ReduceOp.RedOpType = ...) -> Tensor:
        """Reduce in place the tensors that the ranks of the axis give, by default to their sum, or
        by `op`, and return this rank's tensor. Every rank of the axis calls it."""


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int, axis: VocabAxis
    ) -> Tensor:
        rows = logits.size(-1)
        start = axis.rank * rows
        work = logits.to(
            torch.float64 if logits.dtype == torch.float64 else torch.float32, copy=True
        )
        # Padding columns take no probability.
        work[:, max(vocab_size - start, 0) :] = float("-inf")
        largest = axis.all_reduce(work.amax(dim=-1), ReduceOp.MAX)
        work.sub_(largest.unsqueeze(-1))
        local = targets - start
        elsewhere = (local < 0) | (local >= rows)
        # Exactly one rank has a target's column; the others look at column 0 and add nothing.
        local = local.masked_fill(elsewhere, 0)
        target = work.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        axis.all_reduce(target)
        total = axis.all_reduce(work.exp_().sum(dim=-1))
        # The softmax takes the room of the logits, and backward the room of the softmax.
        work.div_(total.unsqueeze(-1))
        ctx.save_for_backward(work, local, elsewhere)
        ctx.dtype = logits.dtype
        return total.log_().sub_(target)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, local, elsewhere = ctx.saved_tensors
        is_here = torch.ones_like(gradient).masked_fill(elsewhere, 0.0)
        softmax.scatter_add_(-1, local.unsqueeze(-1), -is_here.unsqueeze(-1))
        return softmax.mul_(gradient.unsqueeze(-1)).to(ctx.dtype), None, None, None


vocab_parallel_cross_entropy = _CrossEntropy.apply
"""Differentiable function (logits [n, v/t], targets [n], vocab_size, axis) → loss of each target,
[n], in fp32 (fp64 stays fp64). Targets are counted over the whole vocabulary.

Columns at or above `vocab_size`, counted over all ranks, are padding and are ignored. Two sums and
one maximum are all-reduced; logits are never gathered (2019 paper, Section 3). Every rank of the
axis calls it. Backward overwrites the saved softmax, so it can run only once.
"""


def reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    axis: VocabAxis,
) -> Tensor:
    """Return the mean cross-entropy of targets [n], ids in the whole vocabulary, as a scalar in
    fp32 (fp64 stays fp64), from hidden states [n, h] and this rank's rows of the output weight,
    [v/t, h], with all of this rank's logits in memory. Every target must be an id below
    `vocab_size`: a negative one is not ignored, and its loss has no meaning.

    Every rank of `axis` calls it. Rows at or above `vocab_size`, counted over all ranks, are
    padding and are ignored. Backward can run only once. If the axis is divided, the gradient of
    `hidden` is this rank's part of a sum.
    """
    return vocab_parallel_cross_entropy(linear(hidden, weight), targets, vocab_size, axis).mean()


def chunked(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    axis: VocabAxis,
) -> Tensor:
    """Return the mean cross-entropy of targets [n], counted over the whole vocabulary, a scalar in
    fp32, from hidden states [n, h] and this rank's rows of the output weight, [v/t, h], in fp32 or
    bf16 on the CPU, with one block of logits in memory at a time. Rows at or above `vocab_size`,
    counted over all ranks, are padding, and no target may lie there or be negative. Every rank of
    `axis` calls it.

    The gradients are computed along with the loss, and backward scales them in place, so it can run
    only once. On an axis of several ranks each block all-reduces one maximum and two sums per
    position, and the gradient of `hidden` is this rank's part of a sum.
    """
    return in_chunks(
        hidden,
        weight,
        targets,
        vocab_size,
        axis,
        LogitLoops(log_sum, softmax_gradient, CHUNK_BYTES),
    )


class LogitLoops(NamedTuple):
    """A device's implementations of the functions `log_sum` and `softmax_gradient` of this module,
    which work on rows of logits, and `chunk_bytes`, the largest size of a block of logits on that
    device, in bytes."""

    log_sum: Callable[..., None]
    softmax_gradient: Callable[..., None]
    chunk_bytes: int


def in_chunks(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    axis: VocabAxis,
    loops: LogitLoops,
) -> Tensor:
    """Return the mean cross-entropy of targets [n], counted over the whole vocabulary, a scalar in
    fp32, from hidden states [n, h] and this rank's rows of the output weight, [v/t, h], one block
    of logits at a time; rows at or above `vocab_size`, counted over all ranks, are padding, and no
    target may lie there or be negative. `loops` has a device's functions over the rows of a block.
    Every rank of `axis` calls it, and backward can run only once. If the axis is divided, the
    gradient of `hidden` is this rank's part of a sum. For states in fp16 the gradients are
    multiplied in fp32 by the loss scale and 1/n."""
    return _Chunked.apply(hidden, weight, targets, vocab_size, axis, loops)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        axis: VocabAxis,
        loops: LogitLoops,
    ) -> Tensor:
        hidden = hidden.contiguous()
        is_whole = axis.size == 1
        is_trained = any(ctx.needs_input_grad)
        start = axis.rank * len(weight)
        columns = min(max(vocab_size - start, 0), len(weight))
        targets = targets - start
        chunks = -(-len(hidden) * len(weight) * weight.element_size() // loops.chunk_bytes)
        chunk = -(-len(hidden) // chunks)
        is_half = hidden.dtype == torch.float16
        # In fp16 1/n comes later, in fp32: 2e-5 over 1,024 positions is nothing in fp16.
        factor = HALF_SCALE if is_half else 1.0 / len(hidden)
        ctx.rest = 1.0 / (HALF_SCALE * len(hidden)) if is_half else 1.0
        if not is_trained:
            factor = 0.0
        wide = torch.float32 if is_half else hidden.dtype
        to_hidden = torch.empty_like(hidden, dtype=wide) if is_trained else torch.empty(0)
        to_weight: Tensor | None = None
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for first in range(0, len(hidden), chunk):
            here = slice(first, first + chunk)
            logits = linear(hidden[here], weight)
            numbers = torch.empty(3, len(logits), device=logits.device)
            top = numbers[0]
            sums = numbers[1:]
            loops.log_sum(logits, columns, targets[here], top, sums, factor, is_whole)
            if not is_whole:
                # Exponentials are taken once, from this rank's own maximum, and rows scaled when
                # all maxima are known: taking them again was 4 % of an iteration on two ranks.
                own_top = top
                top = axis.all_reduce(top.clone(), ReduceOp.MAX)
                sums[0] *= (own_top - top).exp_()
                sums = axis.all_reduce(sums)
                if is_trained:
                    loops.softmax_gradient(
                        logits, columns, targets[here], own_top, top, sums, factor
                    )
            total += (sums[0].log().add_(top) - sums[1]).sum(dtype=torch.float64)
            if is_trained:
                # Now, while the logits are there: backward would have to compute them again.
                to_hidden[here] = _product(logits, weight)
                to_weight = _with_product(to_weight, logits.t(), hidden[here])
        if to_weight is not None:
            ctx.save_for_backward(to_hidden, to_weight.to(wide))
        return (total / len(hidden)).float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        to_hidden, to_weight = ctx.saved_tensors
        if ctx.rest != 1.0:
            gradient = gradient * ctx.rest
            return (
                to_hidden.mul_(gradient).half(),
                to_weight.mul_(gradient).half(),
                None,
                None,
                None,
                None,
            )
        # The factor is 1 unless the loss is scaled. To look would make the host wait for a GPU, so
        # there it is always multiplied.
        if registry.on_gpu(gradient.device) or gradient.item() != 1.0:
            to_hidden.mul_(gradient)
            to_weight.mul_(gradient)
        return to_hidden, to_weight, None, None, None, None


def _with_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return `total` plus the matrix product of a and b, added in fp32. If `total` is None, for the
    first block, return the product alone, in fp32 for fp16 numbers, else in their dtype. A total in
    fp32 may be overwritten and be the tensor returned."""
    if total is None:
        return _product(a, b)
    # A sum over blocks in 16 bits would round at each of them.
    return total.addmm_(a, b) if b.dtype == torch.float32 else total.float().add_(_product(a, b))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product of a [m, k] and b [k, n], a tensor [m, n] in their dtype, but in
    fp32 for fp16."""
    if a.dtype != torch.float16:
        return multiply(a, b)
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


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
    logit of the row's target, 0 if the row does not have it. All tensors are on the CPU, logits in
    fp32 or bf16, and `top` and `sums` in fp32. `targets` [n] are counted from this rank's first
    column; another rank's target is negative or not below `columns`.

    The rows of `logits` [n, v/t] have `columns` real logits; the rest is padding. If `factor` is
    above 0, the logits are overwritten: by `factor` × the loss's gradient if the row is whole
    (`is_whole`), else by the exponentials, which `softmax_gradient` takes. Their padding becomes 0.
    """
    _log_sum(array(logits), columns, array(targets), array(top), array(sums), factor, is_whole)


def softmax_gradient(
    logits: Tensor,
    columns: int,
    targets: Tensor,
    own_top: Tensor,
    top: Tensor,
    sums: Tensor,
    factor: float,
) -> None:
    """Turn `logits` [n, v/t], where `log_sum` left exponentials, into `factor` × (softmax − 1 at
    the target), in place; padding, from `columns` on, stays 0.

    `own_top` [n] is this rank's largest logit of each row, `top` [n] that over all ranks. `sums`
    [2, n] are, over all ranks too, Σ exp(logit − top), to which a rank adds the sum of `log_sum` ×
    exp(own_top − top), and the target's logit. `targets` [n] are counted from this rank's first
    column; another rank's target is negative or not below `columns`.
    """
    logits.mul_((own_top - top).exp_().mul_(factor).div_(sums[0]).unsqueeze(1))
    (rows,) = ((targets >= 0) & (targets < columns)).nonzero(as_tuple=True)
    # From the logit and not from the stored exponential, which is rounded.
    slopes = (sums[1] - top).exp_().div_(sums[0]).sub_(1.0).mul_(factor)
    logits[rows, targets[rows]] = slopes[rows].to(logits.dtype)


@Compiled
def _log_sum(
    logits: Array,
    columns: int,
    targets: Array,
    top: Array,
    sums: Array,
    factor: float,
    is_whole: bool,
) -> None:
    # In fp32 and apart from the row, which would round them to 16 bits before they are scaled.
    exponentials = np.empty(columns, dtype=np.float32)
    for r in range(logits.shape[0]):
        row = logits[r]
        target = targets[r]
        most = largest(row, columns)
        total = np.float32(0.0)
        for i in range(columns):
            value = exponential(load(row, i) - most)
            exponentials[i] = value
            total += value
        top[r] = most
        sums[0, r] = total
        sums[1, r] = load(row, target) if 0 <= target < columns else np.float32(0.0)
        if factor > 0.0:
            share = np.float32(factor) / total if is_whole else np.float32(1.0)
            for i in range(columns):
                store(row, i, exponentials[i] * share)
            for i in range(columns, row.size):
                store(row, i, np.float32(0.0))
            if is_whole and 0 <= target < columns:
                # From the unrounded exponential, because a well predicted target's slope is a small
                # difference.
                store(row, target, exponentials[target] * share - np.float32(factor))
