"""Tensor parallelism's conjugate operators: f and g (2019 paper, Section 3, Figure 3), and with sequence parallelism ḡ
and its conjugate (Korthikanti et al. 2022, arXiv 2205.05198, Section 4.2). Activations are [s, b, h], [s/t, b, h] where
the sequence is divided.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from engine.linear import linear, multiply
from engine.parallel.mesh import Axis, sum_in_tree

Collective = Callable[[torch.Tensor], torch.Tensor]


class _Conjugate(torch.autograd.Function):
    """One collective forward, another on the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Collective, backward: Collective) -> torch.Tensor:
        ctx.collective = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.collective(gradient.contiguous()), None, None


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int, axis: Axis) -> tuple[torch.Tensor, ...]:
        ctx.axis = axis
        return tuple(x.view_as(x) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.axis.all_reduce(sum_in_tree(gradients).contiguous()), None, None


class _Shards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, count: int, dim: int) -> tuple[torch.Tensor, ...]:
        ctx.dim = dim
        return tuple(shard.clone() for shard in parameter.chunk(count, dim))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return torch.cat(gradients, ctx.dim), None, None


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, axis: Axis) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.has_bias = axis, bias is not None
        return linear(axis.all_gather(x, dim=0), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        rows, whole = gradient.flatten(0, 1), ctx.axis.all_gather(x, dim=0).flatten(0, 1)
        to_x, to_bias = ctx.axis.reduce_scatter(linear(gradient, weight.t())), rows.sum(dim=0) if ctx.has_bias else None
        return to_x, multiply(rows.T, whole), to_bias, None


def copies(x: torch.Tensor, count: int, axis: Axis | None = None) -> Sequence[torch.Tensor]:
    """x for each of `count` uses; its gradient is theirs added up in a tree, and over `axis` where one is given."""
    return [x] if count == 1 and axis is None else _Copies.apply(x, count, axis or Axis())


def shards(parameter: torch.Tensor, count: int, dim: int) -> Sequence[torch.Tensor]:
    """The parts of a parameter along `dim` that this rank's virtual ranks hold."""
    return [parameter] if count == 1 else _Shards.apply(parameter, count, dim)


def columns(x: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
    """The columns of x that this rank's virtual ranks hold."""
    return [x] if count == 1 else x.chunk(count, dim=-1)


def join_columns(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """What virtual ranks computed, side by side."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=-1)


def enter_tensor_parallel(x: torch.Tensor, axis: Axis, sequence_parallel: bool) -> torch.Tensor:
    """Before a column-parallel product: f, or all-gather of the sequence forward and reduce-scatter backward.

    Megatron-LM: `copy_to_tensor_model_parallel_region`, `gather_from_sequence_parallel_region`.
    """
    if axis.size == 1:
        return x
    gather = partial(axis.all_gather, dim=0)
    return _Conjugate.apply(x, gather, axis.reduce_scatter) if sequence_parallel else copies(x, 1, axis)[0]


def gathered_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, axis: Axis) -> torch.Tensor:
    """xAᵀ + b of a divided sequence, [s/t, b, in] → [s, b, out/t].

    The whole input is gathered again in the backward pass instead of kept (arXiv 2205.05198, Section 4.2.2).
    """
    return _GatheredLinear.apply(x, weight, bias, axis)


def leave_tensor_parallel(x: torch.Tensor, axis: Axis, sequence_parallel: bool) -> torch.Tensor:
    """After a row-parallel product: g, or reduce-scatter of the sequence forward and all-gather backward.

    Megatron-LM: `reduce_from_tensor_model_parallel_region`, `reduce_scatter_to_sequence_parallel_region`.
    """
    if axis.size == 1:
        return x
    if sequence_parallel:
        return _Conjugate.apply(x, axis.reduce_scatter, partial(axis.all_gather, dim=0))
    return _Conjugate.apply(x.contiguous(), axis.all_reduce, torch.Tensor.contiguous)
