"""Tensor parallelism's conjugate operators f and g (2019 paper, Section 3, Figure 3)."""

from typing import Any

import torch

from engine.parallel.mesh import Axis


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.axis.all_reduce(gradient.contiguous()), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        return axis.all_reduce(x.contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def copy_to_tensor_parallel(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """f: identity forward, all-reduce backward."""
    return x if axis.size == 1 else _Copy.apply(x, axis)


def reduce_from_tensor_parallel(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """g: all-reduce forward, identity backward."""
    return x if axis.size == 1 else _Reduce.apply(x, axis)
