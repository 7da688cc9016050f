"""GeLU in its tanh form, x·σ(2√(2/π)(x + 0.044715x³)) (Hendrycks & Gimpel 2016, arXiv 1606.08415)."""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from engine.kernels.compiled import Array, Compiled, array, exponential, inline, load, store

SLOPE, CUBIC = np.float32(2.0 * math.sqrt(2.0 / math.pi)), np.float32(0.044715)


def reference(x: torch.Tensor) -> torch.Tensor:
    """Element by element."""
    return F.gelu(x, approximate="tanh")


def compiled(x: torch.Tensor) -> torch.Tensor:
    """The same, keeping x alone for the backward pass."""
    found: torch.Tensor = _Gelu.apply(x)
    return found


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        found = torch.empty_like(x)
        _gelu(array(x).reshape(-1), array(found).reshape(-1))
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gradient, found = gradient.contiguous(), torch.empty_like(x)
        _gelu_gradient(array(x).reshape(-1), array(gradient).reshape(-1), array(found).reshape(-1))
        return found


@inline
def _odds(x: np.float32) -> np.float32:
    """e to the power of minus the argument of σ: x is multiplied with 1/(1 + odds)."""
    exponent = -SLOPE * (x + CUBIC * x * x * x)
    exponent = np.float32(80.0) if exponent > np.float32(80.0) else exponent
    return exponential(exponent)


@Compiled
def _gelu(x: Array, found: Array) -> None:
    for i in range(x.size):
        value = load(x, i)
        store(found, i, value / (np.float32(1.0) + _odds(value)))


@Compiled
def _gelu_gradient(x: Array, gradient: Array, found: Array) -> None:
    for i in range(x.size):
        value = load(x, i)
        odds = _odds(value)
        share = np.float32(1.0) / (np.float32(1.0) + odds)
        inner = SLOPE * (np.float32(1.0) + np.float32(3.0) * CUBIC * value * value)
        slope = share + value * share * share * odds * inner
        store(found, i, load(gradient, i) * slope)
