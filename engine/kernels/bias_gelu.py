"""Bias, then GeLU in its tanh form, x·σ(2√(2/π)(x + 0.044715x³)) (Hendrycks & Gimpel 2016, arXiv
1606.08415).

One pass each way, as the 2021 paper fuses them (Section 4.2). Shapes: h the last dim.
"""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy import float32
from torch import Tensor

from mlm_repro.engine.compiled import (
    ROWS_TOGETHER,
    Array,
    Compiled,
    array,
    exponential,
    inline,
    load,
    store,
)

SLOPE = float32(2.0 * math.sqrt(2.0 / math.pi))
CUBIC = float32(0.044715)


def reference(x: Tensor, bias: Tensor) -> Tensor:
    """Return GeLU(x + bias) in its tanh form, element by element, for x [..., h] and bias [h]: a
    new tensor [..., h]."""
    return F.gelu(x + bias, approximate="tanh")


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        x = x.contiguous()
        bias = bias.contiguous()
        ctx.save_for_backward(x, bias)
        output = torch.empty_like(x)
        _bias_gelu(_rows(x), array(bias), _rows(output))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, bias = ctx.saved_tensors
        to_x = torch.empty_like(x)
        to_bias = torch.zeros(bias.shape)
        _bias_gelu_gradient(
            _rows(x), array(bias), _rows(gradient.contiguous()), _rows(to_x), array(to_bias)
        )
        return to_x, to_bias.to(bias.dtype)


compiled = _BiasGelu.apply
"""Differentiable function (x [..., h], bias [h]) → GeLU(x + bias) in its tanh form, a new tensor
[..., h], on CPUs, in one pass each way. Only x and bias are kept for backward."""


def _rows(x: Tensor) -> Array:
    return array(x.view(-1, x.size(-1)))


@inline
def _odds(x: float32) -> float32:
    """Return the number e^(−z), at most e⁸⁰, for an activation x with its bias added. z is the
    argument of σ, 2√(2/π)(x + 0.044715x³), so GeLU(x) is x / (1 + e^(−z))."""
    exponent = -SLOPE * (x + CUBIC * x * x * x)
    # `exponential` is right up to 88, and x / (1 + e⁸⁰) is nothing beside any other activation.
    exponent = float32(80.0) if exponent > float32(80.0) else exponent
    return exponential(exponent)


@Compiled
def _bias_gelu(x: Array, bias: Array, output: Array) -> None:
    for r in range(x.shape[0]):
        row = x[r]
        out = output[r]
        for i in range(row.size):
            value = load(row, i) + load(bias, i)
            store(out, i, value / (float32(1.0) + _odds(value)))


@Compiled
def _bias_gelu_gradient(
    x: Array, bias: Array, gradient: Array, to_x: Array, to_bias: Array
) -> None:
    part = np.zeros(bias.size, dtype=float32)
    for r in range(x.shape[0]):
        row = x[r]
        given = gradient[r]
        out = to_x[r]
        for i in range(row.size):
            value = load(row, i) + load(bias, i)
            odds = _odds(value)
            share = float32(1.0) / (float32(1.0) + odds)
            inner = SLOPE * (float32(1.0) + float32(3.0) * CUBIC * value * value)
            # σ′ = σ(1 − σ) = σ² · odds, which does not subtract numbers that are almost equal.
            slope = load(given, i) * (share + value * share * share * odds * inner)
            store(out, i, slope)
            part[i] += slope
        # Sums of few rows first, because one long fp32 sum rounds more.
        if r % ROWS_TOGETHER == ROWS_TOGETHER - 1 or r == x.shape[0] - 1:
            for i in range(row.size):
                to_bias[i] += part[i]
                part[i] = float32(0.0)
