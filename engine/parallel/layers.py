"""Linear layers and embedding divided over the tensor-parallel axis; on an axis of size 1 they are ordinary layers.

With sequence parallelism activations outside are divided along the sequence, [s/t, b, h]. A caller whose next kernel
adds the bias asks for the product alone.

Below are their products, by the library that is fastest on this CPU. With AVX-512, oneDNN is faster than MKL (AMD Zen
4), except for a weight's gradient. Without it MKL is faster, and torch multiplies bf16 one number at a time, so bf16 is
multiplied in float32. The product of a single row takes as long as reading the weight, and our loop reads faster than
both libraries.

Shapes: `s` sequence, `b` microbatch, `t` tensor-parallel ranks.
"""

from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlm_repro.engine.compiled import Array, Compiled, array, load, store
from mlm_repro.engine.parallel.collectives import leave_tensor_parallel
from mlm_repro.engine.parallel.mesh import DONE, Axis
from mlm_repro.engine.parallel.sharding import Role, Roles
from mlm_repro.engine.torch_names import multiplies_bf16, onednn


class ColumnParallelLinear(nn.Module):
    """y = xAᵀ + b with the rows of A (output features) divided: [s, b, in] → [s, b, out/t]."""

    shard_dims: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}
    roles: ClassVar[Roles] = {"weight": Role.WEIGHT, "bias": Role.BIAS}
    bias: nn.Parameter

    def __init__(
        self, in_features: int, out_features: int, axis: Axis, sequence_parallel: bool = False, bias: bool = True
    ) -> None:
        super().__init__()
        self.axis, self.sequence_parallel = axis, sequence_parallel
        shape = [out_features, in_features]
        shape[self.shard_dims["weight"]] //= axis.size
        self.weight = nn.Parameter(torch.empty(shape))
        self.register_parameter("bias", nn.Parameter(torch.empty(shape[0])) if bias else None)

    def forward(self, x: Tensor, add_bias: bool = True) -> Tensor:
        bias = self.bias if add_bias else None
        return linear(x, self.weight, bias) if self.axis.size == 1 else self.divided(x, bias)

    def divided(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product on an axis of several ranks."""
        return _EnteredLinear.apply(x, self.weight, bias, self.axis, self.sequence_parallel)


class RowParallelLinear(ColumnParallelLinear):
    """y = xAᵀ + b with the columns of A (input features) divided: [s, b, in/t] → [s, b, out].

    Every rank holds the whole bias, which is added once, after the all-reduce.
    """

    shard_dims: ClassVar[dict[str, int]] = {"weight": 1}
    roles: ClassVar[Roles] = {"weight": Role.LAST_WEIGHT, "bias": Role.BIAS}

    def divided(self, x: Tensor, bias: Tensor | None) -> Tensor:
        summed = leave_tensor_parallel(linear(x.contiguous(), self.weight), self.axis, self.sequence_parallel)
        return summed if bias is None else summed + bias


class VocabParallelEmbedding(nn.Module):
    """Word embedding with its rows (vocabulary) divided: token ids [b, s] → [s, b, h].

    On CPUs the gradient is sparse, the rows that were looked up, if nothing else uses the weight (`is_alone`).
    """

    shard_dims: ClassVar[dict[str, int]] = {"weight": 0}
    roles: ClassVar[Roles] = {"weight": Role.TIED_EMBEDDING}

    def __init__(
        self, padded_vocab_size: int, hidden_size: int, axis: Axis, sequence_parallel: bool = False,
        is_alone: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.axis, self.sequence_parallel, self.is_alone = axis, sequence_parallel, is_alone
        self.rows = padded_vocab_size // axis.size
        self.weight = nn.Parameter(torch.empty(self.rows, hidden_size))

    def forward(self, tokens: Tensor) -> Tensor:
        tokens, is_sparse = tokens.transpose(0, 1), self.is_alone and not tokens.is_cuda
        if self.axis.size == 1:
            return F.embedding(tokens, self.weight, sparse=is_sparse)
        local = tokens - self.axis.rank * self.rows
        elsewhere = (local < 0) | (local >= self.rows)
        embedded = F.embedding(local.masked_fill(elsewhere, 0), self.weight, sparse=is_sparse)
        embedded = embedded.masked_fill(elsewhere.unsqueeze(-1), -0.0)  # adds nothing, even to -0.0
        return leave_tensor_parallel(embedded, self.axis, self.sequence_parallel)


class _EnteredLinear(torch.autograd.Function):
    """f, then xAᵀ + b. Backward, the input's gradient is summed over the ranks while the weight's is computed.

    A sequence that is divided, [s/t, b, in], is gathered in place of f, and gathered again in the backward pass instead
    of kept (arXiv 2205.05198, Section 4.2.2).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, is_divided: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.has_bias, ctx.is_divided = axis, bias is not None, is_divided
        return linear(axis.all_gather(x, dim=0) if is_divided else x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        axis, whole = ctx.axis, ctx.axis.all_gather(x, dim=0) if ctx.is_divided else x
        rows, to_x = gradient.reshape(-1, gradient.size(-1)), linear(gradient, weight.t()).contiguous()
        work = DONE if ctx.is_divided else axis.start_all_reduce(to_x)
        to_x = axis.reduce_scatter(to_x) if ctx.is_divided else to_x
        to_weight = multiply(rows.T, whole.reshape(-1, x.size(-1)))
        to_bias = rows.sum(dim=0) if ctx.has_bias else None
        with axis.waiting:
            work.wait()
        return to_x, to_weight, to_bias, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in], weight [out, in] and bias [out], of any strides → [..., out]."""
    if weight.is_mkldnn:
        return _product(x, weight, bias)
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16):
        return F.linear(x, weight, bias)
    has_gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    if not has_gradient and x.numel() == x.size(-1) > 0:
        return _one_row(x, weight, bias)
    if not onednn if x.dtype == torch.float32 else multiplies_bf16:
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias) if has_gradient else _product(x, weight, bias)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a [..., m, k] times b [..., k, n] → [..., m, n], without a gradient."""
    return (widened(a) @ widened(b)).to(a.dtype)


def widened(x: Tensor) -> Tensor:
    """x, converted to float32 if it is bf16 and this processor cannot multiply bf16."""
    return x.float() if x.dtype == torch.bfloat16 and x.device.type == "cpu" and not multiplies_bf16 else x


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if (wide := widened(x)) is not x:
        return F.linear(wide, weight.float(), None if bias is None else bias.float()).to(x.dtype)
    return onednn._linear_pointwise(x, weight, bias, "none", [], "")


def _one_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output, bias = x.new_empty(*x.shape[:-1], len(weight)), x.new_zeros(1) if bias is None else bias.contiguous()
    _multiply_row(array(x.reshape(-1)), array(weight.contiguous()), array(bias), array(output.view(-1)))
    return output


@Compiled
def _multiply_row(x: Array, weight: Array, bias: Array, output: Array) -> None:
    for o in range(output.size):
        row, total = weight[o], np.float32(0.0)
        for i in range(row.size):
            total += load(row, i) * load(x, i)
        store(output, o, total + load(bias, o if bias.size > 1 else 0))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.size(-1))
        return (
            _product(gradient, weight.t(), None) if to_x else None,
            multiply(rows.t(), x.reshape(-1, x.size(-1))) if to_weight else None,
            rows.sum(dim=0) if to_bias else None,
        )
