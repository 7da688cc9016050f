"""Kernels by name: a reference in plain torch and, for some devices, a faster implementation.

An implementation is a differentiable function of tensors. Its module is imported when it is first
used.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

REFERENCE = "reference"
# Names and not functions, because modules of GPUs import Triton, which is not everywhere.
PLACES = {
    "attention": ("attention:reference", "attention:blocked", "gpu.attention:flash"),
    "linear_cross_entropy": (
        "cross_entropy:reference",
        "cross_entropy:chunked",
        "gpu.cross_entropy:chunked",
    ),
    "dropout": ("dropout:reference", "dropout:compiled", "gpu.bias_dropout_add:dropout"),
    "bias_gelu": ("bias_gelu:reference", "bias_gelu:compiled", "gpu.bias_gelu:fused"),
    "bias_dropout_add": (
        "dropout:bias_dropout_add",
        "dropout:compiled_bias_dropout_add",
        "gpu.bias_dropout_add:fused",
    ),
    "add_norm": ("dropout:add_norm", None, "gpu.bias_dropout_add:add_norm"),
    "adamw": ("adam:adamw", None, "gpu.adamw:fused"),
    "masked_softmax": ("attention:masked_softmax", None, "gpu.masked_softmax:fused"),
    "dropout_bits": ("dropout:reference_bits", "dropout:compiled_bits", None),
}
"""Name of a kernel → its implementations, each as module:function in this folder: the reference,
for CPUs, and for GPUs. None stands for the reference."""
KERNELS = {
    name: {
        kind: place for kind, place in zip((REFERENCE, "cpu", "cuda"), places, strict=True) if place
    }
    for name, places in PLACES.items()
}
"""Dict name of a kernel → dict REFERENCE or a type of device → module:function in this folder; a
device without an entry takes the reference."""
# fp64, in which layouts are compared, takes the references.
DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}
"""Type of device → dtypes that its implementations accept. Tensors of others go to the
reference."""


def on_gpu(device: torch.device) -> bool:
    """Return True unless the device is a CPU, so for `meta` too. Callers ask in order to launch
    fewer kernels: on a GPU dropout keys are copied together, products themselves add up their
    weights' gradients, and the optimizer's update also divides the gradients."""
    # Not `== "cuda"`: launches are counted on tensors without values too.
    return device.type != "cpu"


def kernel(name: str, tensor: torch.Tensor) -> Callable[..., Any]:
    """Return the function that implements the kernel `name` for tensors of the device and dtype of
    `tensor`: the device's faster one, if it has one that takes this dtype, else the reference in
    plain torch. On a GPU without Triton it is the reference too. Raises KeyError for an unknown
    name."""
    return implementation(
        name,
        tensor.device.type if tensor.dtype in DTYPES.get(tensor.device.type, ()) else REFERENCE,
    )


@cache
def implementation(name: str, device: str) -> Callable[..., Any]:
    """Return the function that implements the kernel `name` for a type of device such as `cuda`, or
    for REFERENCE: the reference in plain torch if the device has no other or Triton is missing. Its
    module is imported. Raises KeyError for an unknown name."""
    places = KERNELS[name]
    if device == "cuda" and find_spec("triton") is None:
        device = REFERENCE
    module, function = places.get(device, places[REFERENCE]).split(":")
    return getattr(import_module(f".{module}", __package__), function)
