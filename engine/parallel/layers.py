"""Linear layers and embedding divided over the tensor-parallel axis; on an axis of size 1 they are
ordinary layers.

A product is Y = XA + b, and `weight` is A transposed. With sequence parallelism activations outside
are divided along the sequence, [s/t, b, h]. A caller whose next kernel adds the bias asks for the
product alone.

Shapes: `s` sequence, `b` microbatch, `t` tensor-parallel ranks.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlm_repro.engine.kernels.products import linear, multiply
from mlm_repro.engine.parallel.collectives import leave_tensor_parallel
from mlm_repro.engine.parallel.mesh import DONE, ParallelMesh
from mlm_repro.engine.parallel.sharding import Role, Roles


class ColumnParallelLinear(nn.Module):
    """Y = XA + b with the columns of A, the output features, divided: [s, b, in] → [s, b, out/t].

                     A = [A_1 … A_t]
        X whole      Y = [Y_1 … Y_t],   Y_i = X A_i + b_i

    Rank i holds A_iᵀ [out/t, in] and b_i [out/t], both cut along dim 0. Its input goes through f:
    nothing forward, an all-reduce of the gradient backward; where the sequence is divided, X is
    [s/t, b, in], and there are an all-gather and a reduce-scatter.

    The constructor takes the whole sizes, of which t must divide `out_features`; with `bias` False
    there is no b. The parameters are not initialized here. A call with `add_bias` False leaves b
    out, for a caller that adds the attribute `bias` itself.
    """

    shard_dims: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}
    roles: ClassVar[Roles] = {"weight": Role.WEIGHT, "bias": Role.BIAS}
    bias: nn.Parameter

    def __init__(
        self, in_features: int, out_features: int, mesh: ParallelMesh, bias: bool = True
    ) -> None:
        super().__init__()
        self.mesh = mesh
        # `layout_of` has refused sizes that tp does not divide.
        own = out_features // mesh.tp.size
        self.weight = nn.Parameter(torch.empty(own, in_features))
        self.register_parameter("bias", nn.Parameter(torch.empty(own)) if bias else None)

    def forward(self, x: Tensor, add_bias: bool = True) -> Tensor:
        bias = self.bias if add_bias else None
        if self.mesh.tp.size == 1:
            return linear(x, self.weight, bias)
        return _EnteredLinear.apply(x, self.weight, bias, self.mesh)  # f, then the product


class RowParallelLinear(nn.Module):
    """Y = XA + b with the rows of A, the input features, divided: [s, b, in/t] → [s, b, out], or
    [s/t, b, out] where the sequence is divided.

                             ⎡ A_1 ⎤
        X = [X_1 … X_t]  A = ⎢  ⋮  ⎥   Y = X_1 A_1 + … + X_t A_t + b
                             ⎣ A_t ⎦

    Rank i holds A_iᵀ [out, in/t], cut along dim 1, and the whole b, which is added once, after the
    sum. This is g: an all-reduce forward, nothing backward; where the sequence is divided, a
    reduce-scatter and an all-gather.

    The constructor takes the whole sizes, of which t must divide `in_features`; with `bias` False
    there is no b. The parameters are not initialized here. A call with `add_bias` False leaves b
    out, for a caller that adds the attribute `bias` itself.
    """

    shard_dims: ClassVar[dict[str, int]] = {"weight": 1}
    roles: ClassVar[Roles] = {"weight": Role.LAST_WEIGHT, "bias": Role.BIAS}
    bias: nn.Parameter

    def __init__(
        self, in_features: int, out_features: int, mesh: ParallelMesh, bias: bool = True
    ) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(torch.empty(out_features, in_features // mesh.tp.size))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features)) if bias else None)

    def forward(self, x: Tensor, add_bias: bool = True) -> Tensor:
        bias = self.bias if add_bias else None
        if self.mesh.tp.size == 1:
            return linear(x, self.weight, bias)
        product = linear(x.contiguous(), self.weight)  # this rank's term of the sum
        y = leave_tensor_parallel(product, self.mesh.tp, self.mesh.sequence_parallel)  # g
        return y if bias is None else y + bias


class VocabParallelEmbedding(nn.Module):
    """Word embedding with its rows (vocabulary) divided: token ids [b, s] → [s, b, h], or with
    sequence parallelism this rank's positions, [s/t, b, h].

    The constructor takes the whole number of rows, which t must divide; the parameters are not
    initialized here. A rank looks up the words that it holds, and the ranks' vectors are added up
    by an all-reduce, with sequence parallelism by a reduce-scatter. On CPUs the gradient is sparse,
    the rows that were looked up, if the output head is on another pipeline stage.
    """

    shard_dims: ClassVar[dict[str, int]] = {"weight": 0}
    roles: ClassVar[Roles] = {"weight": Role.TIED_EMBEDDING}

    def __init__(self, padded_vocab_size: int, hidden_size: int, mesh: ParallelMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.rows = padded_vocab_size // mesh.tp.size
        self.weight = nn.Parameter(torch.empty(self.rows, hidden_size))

    def forward(self, tokens: Tensor) -> Tensor:
        # Sparse rows save 2 to 3 % of an iteration on two stages. With one stage the head adds a
        # dense gradient to the same weight.
        tokens, is_sparse = tokens.transpose(0, 1), self.mesh.pp.size > 1 and not tokens.is_cuda
        if self.mesh.tp.size == 1:
            return F.embedding(tokens, self.weight, sparse=is_sparse)
        local = tokens - self.mesh.tp.rank * self.rows
        elsewhere = (local < 0) | (local >= self.rows)
        # Row 0 stands in for another rank's word, and is cleared in the next line.
        embedded = F.embedding(local.masked_fill(elsewhere, 0), self.weight, sparse=is_sparse)
        embedded = embedded.masked_fill(elsewhere.unsqueeze(-1), -0.0)  # adds nothing, even to -0.0
        return leave_tensor_parallel(embedded, self.mesh.tp, self.mesh.sequence_parallel)


class _EnteredLinear(torch.autograd.Function):
    """Autograd function (x, weight, bias or None, mesh) of a column-parallel product and what
    precedes it, f: x [s, b, in] → [s, b, out/t]. f does nothing forward, and backward an all-reduce
    of the input's gradient, which runs while the weight's gradient is computed. Every
    tensor-parallel rank calls it.

    A sequence that is divided, [s/t, b, in], is gathered in place of f, and gathered again in the
    backward pass instead of kept (arXiv 2205.05198, Section 4.2.2); its gradient is
    reduce-scattered.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, mesh: ParallelMesh
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.mesh = mesh
        ctx.has_bias = bias is not None
        return linear(mesh.tp.all_gather(x, dim=0) if mesh.sequence_parallel else x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        (x, weight), axis, is_divided = ctx.saved_tensors, ctx.mesh.tp, ctx.mesh.sequence_parallel
        # The whole input would take t times the memory of its part from forward to backward.
        whole = axis.all_gather(x, dim=0) if is_divided else x
        # The input's gradient comes first, because its all-reduce then runs beside the weight's
        # product.
        rows = gradient.reshape(-1, gradient.size(-1))
        to_x = linear(gradient, weight.t()).contiguous()
        work = DONE if is_divided else axis.start_all_reduce(to_x)
        # An axis can begin an all-reduce, but not a reduce-scatter, which therefore overlaps
        # nothing.
        to_x = axis.reduce_scatter(to_x) if is_divided else to_x
        to_weight = multiply(rows.T, whole.reshape(-1, x.size(-1)))
        to_bias = rows.sum(dim=0) if ctx.has_bias else None
        with axis.waiting:
            work.wait()
        return to_x, to_weight, to_bias, None
