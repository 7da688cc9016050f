"""Cross-entropy over logits whose vocabulary is divided over the tensor-parallel axis."""

from typing import Any

import torch

from engine.parallel.mesh import MAX, Axis


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, axis: Axis) -> torch.Tensor:
        rows = logits.size(-1)
        start = axis.rank * rows
        work = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32, copy=True)
        work[:, max(vocab_size - start, 0) :] = float("-inf")
        largest = axis.all_reduce(work.amax(dim=-1), MAX)
        work.sub_(largest.unsqueeze(-1))
        local = targets - start
        elsewhere = (local < 0) | (local >= rows)
        local = local.masked_fill(elsewhere, 0)
        target = work.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        axis.all_reduce(target)
        total = axis.all_reduce(work.exp_().sum(dim=-1))
        work.div_(total.unsqueeze(-1))
        ctx.save_for_backward(work, local, elsewhere)
        ctx.dtype = logits.dtype
        return total.log_().sub_(target)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        softmax, local, elsewhere = ctx.saved_tensors
        is_here = torch.ones_like(gradient).masked_fill(elsewhere, 0.0)
        softmax.scatter_add_(-1, local.unsqueeze(-1), -is_here.unsqueeze(-1))
        return softmax.mul_(gradient.unsqueeze(-1)).to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, axis: Axis
) -> torch.Tensor:
    """Loss of each target, [n], from logits [n, v/t], in fp32 (fp64 stays fp64).

    Columns at or above `vocab_size` are padding and are ignored. Two sums and one maximum are all-reduced; logits are
    never gathered (2019 paper, Section 3). Backward overwrites the saved softmax, so it can run only once.
    """
    return _CrossEntropy.apply(logits, targets, vocab_size, axis)
