"""Linear layers and embedding divided over the tensor-parallel axis; on an axis of size 1 they are ordinary layers.

A rank that stands for several virtual ranks computes the product of each alone and adds them up in a tree, so that
every product has the shape, and every sum the order, that it has on as many real ranks.

With sequence parallelism activations outside are divided along the sequence, [s/t, b, h]. A caller whose next kernel
adds the bias asks for the product alone.
Each layer states in `shard_dims` along which dim its parameters are divided. Shapes: `s` sequence, `b` microbatch,
`t` tensor-parallel ranks.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from engine.linear import linear
from engine.parallel.collectives import (
    columns,
    copies,
    enter_tensor_parallel,
    gathered_linear,
    join_columns,
    leave_tensor_parallel,
    shards,
)
from engine.parallel.mesh import Axis, sum_in_tree


class ColumnParallelLinear(nn.Module):
    """y = xAᵀ + b with the rows of A (output features) divided: [s, b, in] → [s, b, out/t]."""

    shard_dims: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}
    bias: nn.Parameter

    def __init__(
        self, in_features: int, out_features: int, axis: Axis, sequence_parallel: bool = False, bias: bool = True
    ) -> None:
        super().__init__()
        self.axis, self.sequence_parallel = axis, sequence_parallel
        self.weight = nn.Parameter(torch.empty(out_features // axis.size, in_features))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features // axis.size)) if bias else None)

    def forward(self, x: torch.Tensor, add_bias: bool = True) -> torch.Tensor:
        bias = self.bias if add_bias else None
        count, is_divided = self.axis.virtual, self.sequence_parallel and self.axis.size > 1
        if is_divided and not self.axis.in_order:
            return gathered_linear(x, self.weight, bias, self.axis)
        inputs = copies(enter_tensor_parallel(x, self.axis, is_divided), count)
        biases = [None] * count if bias is None else shards(bias, count, 0)
        return join_columns([linear(*part) for part in zip(inputs, shards(self.weight, count, 0), biases, strict=True)])


class RowParallelLinear(nn.Module):
    """y = xAᵀ + b with the columns of A (input features) divided: [s, b, in/t] → [s, b, out].

    The bias is whole on every rank and added once, after the all-reduce.
    """

    shard_dims: ClassVar[dict[str, int]] = {"weight": 1}
    bias: nn.Parameter

    def __init__(
        self, in_features: int, out_features: int, axis: Axis, sequence_parallel: bool = False, bias: bool = True
    ) -> None:
        super().__init__()
        self.axis, self.sequence_parallel = axis, sequence_parallel
        self.weight = nn.Parameter(torch.empty(out_features, in_features // axis.size))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features)) if bias else None)

    def forward(self, x: torch.Tensor, add_bias: bool = True) -> torch.Tensor:
        bias = self.bias if add_bias else None
        if self.axis.size * self.axis.virtual == 1:
            return linear(x, self.weight, bias)
        inputs = [part.contiguous() for part in columns(x, self.axis.virtual)]
        parts = [linear(*part) for part in zip(inputs, shards(self.weight, self.axis.virtual, 1), strict=True)]
        summed = leave_tensor_parallel(sum_in_tree(parts), self.axis, self.sequence_parallel)
        return summed if bias is None else summed + bias


class VocabParallelEmbedding(nn.Module):
    """Word embedding with its rows (vocabulary) divided: token ids [b, s] → [s, b, h].

    Where nothing else uses its weight (`is_alone`), on CPUs that has a sparse gradient: the rows that were looked up.
    """

    shard_dims: ClassVar[dict[str, int]] = {"weight": 0}

    def __init__(
        self, padded_vocab_size: int, hidden_size: int, axis: Axis, sequence_parallel: bool = False,
        is_alone: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.axis, self.sequence_parallel, self.is_alone = axis, sequence_parallel, is_alone
        self.rows = padded_vocab_size // axis.size
        self.weight = nn.Parameter(torch.empty(self.rows, hidden_size))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.transpose(0, 1)
        is_sparse = self.is_alone and not tokens.is_cuda and not self.axis.in_order
        if self.axis.size == 1:
            return F.embedding(tokens, self.weight, sparse=is_sparse)
        local = tokens - self.axis.rank * self.rows
        elsewhere = (local < 0) | (local >= self.rows)
        embedded = F.embedding(local.masked_fill(elsewhere, 0), self.weight, sparse=is_sparse)
        embedded = embedded.masked_fill(elsewhere.unsqueeze(-1), -0.0)  # which adds nothing even to -0.0
        return leave_tensor_parallel(embedded, self.axis, self.sequence_parallel)
