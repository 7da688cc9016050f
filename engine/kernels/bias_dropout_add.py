"""Bias, dropout and addition to the residual stream, in one pass each way (2021 paper, Section 4.2).

Shapes: s sequence, b microbatch, h hidden. Rows of the mask are positions.
"""

from typing import Any

import numpy as np
import torch

from engine.compiled import BLOCK, ROWS_TOGETHER, Array, Compiled, array, load, random_bits, store
from engine.kernels import dropout
from engine.kernels.dropout import DropoutMask, mask_keys


def reference(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, mask: DropoutMask | None) -> torch.Tensor:
    """residual + dropout(x + bias), for x and residual [s, b, h] and bias [h]."""
    branch = x + bias
    return residual + (branch if mask is None else dropout.reference(branch, mask))


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, mask: DropoutMask | None
    ) -> torch.Tensor:
        ctx.mask, ctx.bias_dtype = mask, bias.dtype
        x, residual = x.contiguous(), residual.contiguous()
        output = torch.empty_like(x)
        _bias_dropout_add(array(x), array(bias.contiguous()), array(residual), array(output), *mask_keys(mask))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        gradient = gradient.contiguous()
        to_x = gradient if ctx.mask is None else torch.empty_like(gradient)
        to_bias = torch.zeros(gradient.size(-1))
        _gradient(array(gradient), array(to_x), array(to_bias), *mask_keys(ctx.mask))
        return to_x, to_bias.to(ctx.bias_dtype), gradient, None


compiled = _BiasDropoutAdd.apply
"""The same in one pass each way. Nothing is kept: backward recomputes the mask."""


@Compiled
def _bias_dropout_add(
    x: Array, bias: Array, residual: Array, output: Array, keys: Array, first_row: int, threshold: np.int32,
    scale: np.float32,
) -> None:  # fmt: skip
    columns = x.shape[2]
    bits = np.empty((columns + BLOCK - 1) // BLOCK * BLOCK, dtype=np.uint16)
    for r in range(x.shape[0]):
        for sample in range(x.shape[1]):
            row, before, out = x[r, sample], residual[r, sample], output[r, sample]
            if keys.size == 0:
                for i in range(columns):
                    store(out, i, load(before, i) + (load(row, i) + load(bias, i)))
            else:
                random_bits(keys[sample], first_row + r, columns, bits)
                for i in range(columns):
                    keep = scale if np.int32(bits[i]) >= threshold else np.float32(0.0)
                    store(out, i, load(before, i) + (load(row, i) + load(bias, i)) * keep)


@Compiled
def _gradient(
    gradient: Array, to_x: Array, to_bias: Array, keys: Array, first_row: int, threshold: np.int32, scale: np.float32
) -> None:
    """Write the gradient of x to `to_x` and add that of the bias to `to_bias`. Without keys `to_x` is not written."""
    columns = gradient.shape[2]
    bits = np.empty((columns + BLOCK - 1) // BLOCK * BLOCK, dtype=np.uint16)
    part = np.zeros(columns, dtype=np.float32)
    rows = 0
    for r in range(gradient.shape[0]):
        for sample in range(gradient.shape[1]):
            row, out = gradient[r, sample], to_x[r, sample]
            if keys.size == 0:
                for i in range(columns):
                    part[i] += load(row, i)
            else:
                random_bits(keys[sample], first_row + r, columns, bits)
                for i in range(columns):
                    keep = scale if np.int32(bits[i]) >= threshold else np.float32(0.0)
                    value = load(row, i) * keep
                    store(out, i, value)
                    part[i] += value
            rows += 1
            if rows % ROWS_TOGETHER == 0 or rows == gradient.shape[0] * gradient.shape[1]:
                for i in range(columns):
                    to_bias[i] += part[i]
                    part[i] = np.float32(0.0)
