"""Kernels by name: a reference in plain torch and, for some devices, a faster implementation.

An implementation is a differentiable function of tensors. Its module is imported when it is first used.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

REFERENCE = "reference"
KERNELS: dict[str, dict[str, str]] = {}
"""Name → type of device or REFERENCE → module:function. `engine/kernels/__init__.py` fills it."""

DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}
"""Dtypes that a device's implementations accept. Others go to the reference."""


def kernel(name: str, tensor: torch.Tensor) -> Callable[..., Any]:
    """The implementation for a tensor's device and dtype. Raises KeyError for an unknown name."""
    return implementation(name, tensor.device.type if tensor.dtype in DTYPES.get(tensor.device.type, ()) else REFERENCE)


@cache
def implementation(name: str, device: str) -> Callable[..., Any]:
    """The implementation for a type of device. It is the reference if the device has none or Triton is missing."""
    places = KERNELS[name]
    if device == "cuda" and find_spec("triton") is None:
        device = REFERENCE
    module, function = places.get(device, places[REFERENCE]).split(":")
    loaded: Callable[..., Any] = getattr(import_module(module), function)
    return loaded
