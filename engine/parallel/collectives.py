"""Tensor parallelism's conjugate operators: f and g (2019 paper, Section 3, Figure 3), and with
sequence parallelism ḡ and its conjugate (Korthikanti et al. 2022, arXiv 2205.05198, Section 4.2).
Activations are [s, b, h], [s/t, b, h] where the sequence is divided.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mlm_repro.engine.parallel.mesh import Axis

Collective = Callable[[Tensor], Tensor]


class _Conjugate(torch.autograd.Function):
    """Autograd function (x, forward, backward) → the result of the collective `forward` for x. The
    backward pass applies the collective `backward` to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Collective, backward: Collective) -> Tensor:
        ctx.collective = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # Collectives take elements as they lie in memory; autograd may hand over an expanded or
        # transposed gradient.
        return ctx.collective(gradient.contiguous()), None, None


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def enter_tensor_parallel(x: Tensor, axis: Axis, sequence_parallel: bool = False) -> Tensor:
    """Return x, [s, b, h] or with sequence parallelism [s/t, b, h], as input of a column-parallel
    product, [s, b, h]; on an axis of one rank x itself. Forward is f, which changes nothing and
    sums the gradient over the axis backward; with sequence parallelism it is an all-gather of the
    sequence, and a reduce-scatter backward. Every rank of the axis calls it.

    Megatron-LM: `copy_to_tensor_model_parallel_region`, `gather_from_sequence_parallel_region`.
    """
    if axis.size == 1:
        return x
    if sequence_parallel:
        return _Conjugate.apply(x, partial(axis.all_gather, dim=0), axis.reduce_scatter)
    return _Conjugate.apply(x, _same, axis.all_reduce)


def leave_tensor_parallel(x: Tensor, axis: Axis, sequence_parallel: bool = False) -> Tensor:
    """Return the sum over the axis of x, each rank's term of a row-parallel product: [s, b, h], or
    with sequence parallelism this rank's part of the sum, [s/t, b, h]; on an axis of one rank x
    itself. On a larger axis x may be overwritten. Forward is g, an all-reduce, which changes
    nothing backward; with sequence parallelism it is a reduce-scatter of the sequence, and an
    all-gather backward. Every rank of the axis calls it.

    Megatron-LM: `reduce_from_tensor_model_parallel_region`,
    `reduce_scatter_to_sequence_parallel_region`.
    """
    if axis.size == 1:
        return x
    if sequence_parallel:
        return _Conjugate.apply(x, axis.reduce_scatter, partial(axis.all_gather, dim=0))
    # Summed in place, which needs contiguous memory; nothing else reads the product.
    return _Conjugate.apply(x.contiguous(), axis.all_reduce, _same)


def gather_features(x: Tensor, axis: Axis, start: int, whole: int) -> Tensor:
    """Return the features of all ranks side by side along the last dim, [..., whole], on every
    rank; this rank's part x is put at column `start` there. Every rank of the axis calls it, and
    the parts may differ in width.

    Backward takes this rank's part of a gradient that is whole on every rank.
    """
    stop = start + x.shape[-1]

    def gather(part: Tensor) -> Tensor:
        # Parts may differ in width (heads that do not divide evenly), which an all-gather does not
        # take; zeros add nothing.
        return axis.all_reduce(torch.nn.functional.pad(part, (start, whole - stop)))

    return _Conjugate.apply(x, gather, lambda gradient: gradient[..., start:stop].contiguous())
