"""Output projection and cross-entropy over a vocabulary that is divided over the tensor-parallel axis.

Shapes: n positions, h hidden, v padded vocabulary, t tensor-parallel ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from engine.compiled import Array, Compiled, array, exponential, largest, load, store
from engine.kernels.vocab_cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_logits
from engine.linear import linear, multiply
from engine.parallel.mesh import Axis, sum_in_tree

CHUNK_BYTES = 1 << 27
"""Most bytes of logits that exist at a time."""
LEAST_SHARE = 1e-20
"""Of a row, in what all ranks' exponentials add up to: below, softmax is 0 beside the one at the target."""


def reference(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab_size: int, axis: Axis
) -> torch.Tensor:
    """Mean loss of targets [n], a scalar in fp32 (fp64 stays fp64), from hidden [n, h] and weight [v/t, h].

    Rows of the weight at or above `vocab_size` are padding and take no part. Where the axis is divided, the gradient
    of `hidden` is this rank's part of a sum.
    """
    logits = vocab_parallel_logits(hidden, weight, axis)
    return vocab_parallel_cross_entropy(logits, targets, vocab_size, axis).mean()


def chunked(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab_size: int, axis: Axis
) -> torch.Tensor:
    """The same with the logits of some positions at a time; the gradients are made along with the loss.

    Per chunk one maximum and one sum are all-reduced, of one and of two numbers for each position.
    """
    return in_chunks(hidden, weight, targets, vocab_size, axis, ROWS, CHUNK_BYTES)


@dataclass(frozen=True)
class LogitLoops:
    """A device's loops over rows of logits, as `log_sum` and `softmax_gradient` below."""

    log_sum: Callable[[torch.Tensor, int, torch.Tensor, torch.Tensor, torch.Tensor, float, bool], None]
    softmax_gradient: Callable[
        [torch.Tensor, int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor | None
    ]


def in_chunks(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab_size: int, axis: Axis, rows: LogitLoops,
    chunk_bytes: int,
) -> torch.Tensor:  # fmt: skip
    """`chunked` with a device's loops, and at most so many bytes of logits at a time."""
    loss: torch.Tensor = _Chunked.apply(hidden, weight, targets, vocab_size, axis, rows, chunk_bytes)
    return loss


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab_size: int, axis: Axis,
        loops: LogitLoops, chunk_bytes: int,
    ) -> torch.Tensor:  # fmt: skip
        hidden, is_whole = hidden.contiguous(), axis.size * axis.virtual == 1
        parts = [_Part(own, axis.rank * axis.virtual + number, vocab_size, targets)
                 for number, own in enumerate(weight.chunk(axis.virtual))]  # fmt: skip
        held = len(weight) * (axis.size if axis.in_order else 1)
        chunks = -(-len(hidden) * held * weight.element_size() // chunk_bytes)
        chunk = -(-len(hidden) // chunks)
        is_trained = any(ctx.needs_input_grad)
        to_hidden = torch.empty_like(hidden) if is_trained else torch.empty(0)
        factor = 1.0 / len(hidden) if is_trained else 0.0
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for first in range(0, len(hidden), chunk):
            here = slice(first, first + chunk)
            rows = hidden[here]
            for part in parts:
                part.log_sum(rows, here, loops, factor, is_whole)
            top, own = parts[0].top, parts[0].own
            if not is_whole:
                top = axis.all_reduce(torch.stack([part.top for part in parts]).amax(dim=0), dist.ReduceOp.MAX)
                for part in parts:
                    part.own[0] *= (part.top - top).exp_()
                own = axis.all_reduce(sum_in_tree([part.own for part in parts]).contiguous())
            total += (own[0].log().add_(top) - own[1]).sum(dtype=torch.float64)
            if not is_trained:
                continue
            if is_whole:
                to_hidden[here] = multiply(parts[0].logits, weight)
                parts[0].gradient.add(parts[0].logits, rows)
            else:
                to_hidden[here] = sum_in_tree([part.gradients(rows, here, loops, top, own, factor) for part in parts])
        if is_trained:
            gradients = [part.gradient.value() for part in parts]
            ctx.save_for_backward(to_hidden, gradients[0] if len(gradients) == 1 else torch.cat(gradients))
        return (total / len(hidden)).float()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        to_hidden, to_weight = ctx.saved_tensors
        if gradient.device.type != "cpu" or gradient.item() != 1.0:  # a GPU's value would have to be waited for
            to_hidden.mul_(gradient)
            to_weight.mul_(gradient)
        return to_hidden, to_weight, None, None, None, None, None


class _Part:
    """The columns of one virtual rank: their logits of a chunk of rows, and what comes of them."""

    def __init__(self, weight: torch.Tensor, number: int, vocab_size: int, targets: torch.Tensor) -> None:
        start = number * len(weight)
        self.weight, self.columns = weight, min(max(vocab_size - start, 0), len(weight))
        self.targets = (targets - start).contiguous()
        self.gradient = _Sum(weight)
        self.logits = self.top = self.own = torch.empty(0)

    def log_sum(self, rows: torch.Tensor, here: slice, loops: LogitLoops, factor: float, is_whole: bool) -> None:
        """Logits of the rows [n, h] with each one's largest, and its sum of exponentials and target's logit [2, n]."""
        self.logits = linear(rows, self.weight)
        self.top = torch.empty(len(rows), device=rows.device)
        self.own = torch.empty(2, len(rows), device=rows.device)
        loops.log_sum(self.logits, self.columns, self.targets[here], self.top, self.own, factor, is_whole)

    def gradients(
        self, rows: torch.Tensor, here: slice, loops: LogitLoops, top: torch.Tensor, own: torch.Tensor, factor: float
    ) -> torch.Tensor:
        """This part's of the rows [n, h], from what `log_sum` finds of all columns; its weight's is added up."""
        targets = self.targets[here]
        scale = loops.softmax_gradient(self.logits, self.columns, targets, self.top, top, own, factor)
        to_rows = multiply(self.logits, self.weight)
        if scale is None:
            self.gradient.add(self.logits, rows)
            return to_rows
        self.gradient.add(self.logits, rows * scale)
        return to_rows.mul_(scale)


class _Sum:
    """The weight's gradient, of chunks added in fp32."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._dtype = weight.dtype
        self._found: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor, rows: torch.Tensor) -> None:
        """Add what a chunk's gradient [n, v/t] and hidden rows [n, h] make."""
        if self._found is None:
            self._found = multiply(gradient.t(), rows)
        elif self._dtype == torch.float32:
            self._found.addmm_(gradient.t(), rows)
        else:
            self._found = self._found.float().add_(multiply(gradient.t(), rows))

    def value(self) -> torch.Tensor:
        """The sum in the weight's dtype."""
        assert self._found is not None
        return self._found.to(self._dtype)


def log_sum(
    logits: torch.Tensor, columns: int, targets: torch.Tensor, top: torch.Tensor, own: torch.Tensor, factor: float,
    is_whole: bool,
) -> None:  # fmt: skip
    """For each row the largest logit, and in `own` [2, n] the sum of exponentials less that and the target's logit.

    With a `factor` the logits become, while they are in the cache, their gradient where these are all columns
    (`is_whole`), elsewhere what `softmax_gradient` takes: the exponentials.
    """
    _log_sum(array(logits), columns, array(targets), array(top), array(own), factor, is_whole)


def softmax_gradient(
    logits: torch.Tensor, columns: int, targets: torch.Tensor, mine: torch.Tensor, top: torch.Tensor,
    own: torch.Tensor, factor: float,
) -> torch.Tensor | None:  # fmt: skip
    """What `log_sum` left → `factor` × (softmax − one at the target), in place, but for a factor of each row, [n, 1].

    Rows keep the exponentials: to multiply them all takes as long as to write them. `mine` are the largest of these
    columns; `top` and `own` are of all columns what `log_sum` finds of these.
    """
    shares = (mine - top).exp_().div_(own[0]).clamp_(min=LEAST_SHARE)
    (here,) = ((targets >= 0) & (targets < columns)).nonzero(as_tuple=True)
    slopes = (own[1] - top).exp_().div_(own[0]).sub_(1.0).div_(shares)
    logits[here, targets[here]] = slopes[here].to(logits.dtype)
    return shares.mul_(factor).unsqueeze(1).to(logits.dtype)


ROWS = LogitLoops(log_sum, softmax_gradient)


@Compiled
def _log_sum(
    logits: Array, columns: int, targets: Array, top: Array, own: Array, factor: float, is_whole: bool
) -> None:  # fmt: skip
    exponentials = np.empty(columns, dtype=np.float32)
    for r in range(logits.shape[0]):
        row, target = logits[r], targets[r]
        most = largest(row, columns)
        total = np.float32(0.0)
        for i in range(columns):
            value = exponential(load(row, i) - most)
            exponentials[i] = value
            total += value
        top[r], own[0, r] = most, total
        own[1, r] = load(row, target) if 0 <= target < columns else np.float32(0.0)
        if factor > 0.0:
            share = np.float32(factor) / total if is_whole else np.float32(1.0)
            for i in range(columns):
                store(row, i, exponentials[i] * share)
            for i in range(columns, row.size):
                store(row, i, np.float32(0.0))
            if is_whole and 0 <= target < columns:
                store(row, target, exponentials[target] * share - np.float32(factor))
