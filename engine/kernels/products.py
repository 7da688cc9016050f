"""Matrix products by the library that is fastest on this processor.

With AVX-512, oneDNN is faster than MKL (AMD Zen 4), except for a weight's gradient. Without it MKL
is faster, and torch multiplies bf16 one number at a time, so bf16 is multiplied in float32. The
product of a single row takes as long as reading the weight, and our loop reads faster than both
libraries.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mlm_repro.engine.compiled import Array, Compiled, array, load, store
from mlm_repro.engine.torch_names import multiplies_bf16, onednn

ADD_PRODUCT = "add_product"
"""Name of an attribute of a weight: the function that takes the two factors of the weight's
gradient, [out, rows] and [rows, in], and writes or adds their product to where the gradient is
kept."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x · weightᵀ + bias, [..., out], for x [..., in], weight [out, in] and bias [out], or
    None for no bias, of any strides; all have one dtype, which the result has too.

    Differentiable, but not with a weight packed for oneDNN: then x gets no gradient either, without
    an error. If a weight has the attribute ADD_PRODUCT, a function, its gradient goes to that
    function and not to autograd.
    """
    # Packed for scoring in oneDNN's own layout, which `F.linear` does not take.
    if weight.is_mkldnn:
        return _product(x, weight, bias)
    if hasattr(weight, ADD_PRODUCT) and torch.is_grad_enabled():
        return _Linear.apply(x, weight, bias)
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16):
        return F.linear(x, weight, bias)
    has_gradient = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, weight, bias)
    )
    if not has_gradient and x.numel() == x.size(-1) > 0:
        # Generation reads a weight at 27 GB/s this way, and at 17 through the libraries.
        return _one_row(x, weight, bias)
    # Without AVX-512 MKL is faster in float32; a processor that multiplies bf16 needs no help.
    if not onednn if x.dtype == torch.float32 else multiplies_bf16:
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias) if has_gradient else _product(x, weight, bias)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product of a [..., m, k] and b [..., k, n], a tensor [..., m, n] in a's
    dtype; bf16 is multiplied in float32 if this processor cannot multiply it."""
    return (widened(a) @ widened(b)).to(a.dtype)


def widened(x: Tensor) -> Tensor:
    """Return the tensor x itself, or a copy of x in float32 if x is bf16 on a CPU that cannot
    multiply bf16."""
    return (
        x.float()
        if x.dtype == torch.bfloat16 and x.device.type == "cpu" and not multiplies_bf16
        else x
    )


def add_product(total: Tensor, a: Tensor, b: Tensor, adds: bool) -> None:
    """Set `total` [m, n], an fp32 tensor on a GPU, in place to the matrix product a·b, or add a·b
    to it if `adds`. a [m, k] and b [k, n] have 16 bits; no product is rounded to 16 bits in
    between."""
    torch.addmm(total, a, b, beta=float(adds), out_dtype=torch.float32, out=total)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    # Without instructions for bf16 torch multiplies one number at a time; float32 is ten times as
    # fast.
    if (wide := widened(x)) is not x:
        return F.linear(wide, weight.float(), None if bias is None else bias.float()).to(x.dtype)
    # 5 to 12 % faster on Zen 4 than torch's default.
    return onednn._linear_pointwise(x, weight, bias, "none", [], "")


def _one_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output = x.new_empty(*x.shape[:-1], len(weight))
    bias = x.new_zeros(1) if bias is None else bias.contiguous()
    _multiply_row(
        array(x.reshape(-1)), array(weight.contiguous()), array(bias), array(output.view(-1))
    )
    return output


@Compiled
def _multiply_row(x: Array, weight: Array, bias: Array, output: Array) -> None:
    for o in range(output.size):
        row = weight[o]
        total = np.float32(0.0)
        for i in range(row.size):
            total += load(row, i) * load(x, i)
        store(output, o, total + load(bias, o if bias.size > 1 else 0))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.add_product = getattr(weight, ADD_PRODUCT, None)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.size(-1))
        others = x.reshape(-1, x.size(-1))
        # The product goes to the flat gradient in fp32, and autograd gets none.
        if add := to_weight and ctx.add_product:
            add(rows.t(), others)
        return (
            _product(gradient, weight.t(), None) if to_x else None,
            # MKL, which is faster than oneDNN for this product alone.
            multiply(rows.t(), others) if to_weight and not add else None,
            rows.sum(dim=0) if to_bias else None,
        )
