"""Kernels by name: a reference in plain torch and, for some devices, what is faster and computes the same.

An implementation is a function of tensors that autograd can go through. Its module is imported at the first use.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

REFERENCE = "reference"

KERNELS: dict[str, dict[str, str]] = {
    "attention": {
        REFERENCE: "engine.kernels.attention:reference",
        "cpu": "engine.kernels.attention:blocked",
        "cuda": "engine.kernels.gpu.attention:flash",
    },
    "linear_cross_entropy": {
        REFERENCE: "engine.kernels.cross_entropy:reference",
        "cpu": "engine.kernels.cross_entropy:chunked",
        "cuda": "engine.kernels.gpu.cross_entropy:chunked",
    },
    "dropout": {
        REFERENCE: "engine.kernels.dropout:reference",
        "cpu": "engine.kernels.dropout:compiled",
        "cuda": "engine.kernels.gpu.bias_dropout_add:dropout",
    },
    "bias_gelu": {
        REFERENCE: "engine.kernels.bias_gelu:reference",
        "cpu": "engine.kernels.bias_gelu:compiled",
        "cuda": "engine.kernels.gpu.bias_gelu:fused",
    },
    "bias_dropout_add": {
        REFERENCE: "engine.kernels.bias_dropout_add:reference",
        "cpu": "engine.kernels.bias_dropout_add:compiled",
        "cuda": "engine.kernels.gpu.bias_dropout_add:fused",
    },
    "layer_norm": {
        REFERENCE: "engine.kernels.layer_norm:reference",
        "cuda": "engine.kernels.gpu.layer_norm:fused",
    },
    "masked_softmax": {
        REFERENCE: "engine.kernels.masked_softmax:reference",
        "cuda": "engine.kernels.gpu.masked_softmax:fused",
    },
    "adamw": {
        REFERENCE: "engine.kernels.adam:reference",
        "cpu": "engine.kernels.adam:compiled",
        "cuda": "engine.kernels.gpu.adam:fused",
    },
    "adam_direction": {
        REFERENCE: "engine.kernels.adam:reference_direction",
        "cpu": "engine.kernels.adam:compiled_direction",
        "cuda": "engine.kernels.gpu.adam:fused_direction",
    },
    "dropout_bits": {
        REFERENCE: "engine.kernels.dropout_bits:reference",
        "cpu": "engine.kernels.dropout_bits:compiled",
        "cuda": "engine.kernels.gpu.dropout_bits:fused",
    },
}
"""Name → type of device, or REFERENCE → module:function."""

DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}
"""What a device's implementations take; all else goes to the reference."""


def kernel(name: str, tensor: torch.Tensor) -> Callable[..., Any]:
    """The implementation for a tensor's device and dtype. Raises KeyError for an unknown name."""
    return implementation(name, tensor.device.type if tensor.dtype in DTYPES.get(tensor.device.type, ()) else REFERENCE)


@cache
def implementation(name: str, device: str) -> Callable[..., Any]:
    """The implementation for a type of device, the reference where it has none of its own or Triton is missing."""
    places = KERNELS[name]
    if device == "cuda" and find_spec("triton") is None:
        device = REFERENCE
    module, function = places.get(device, places[REFERENCE]).split(":")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found
