"""Kernels: a reference in plain torch each, and faster implementations for CPUs and GPUs."""

from engine.kernels.registry import KERNELS, REFERENCE

KINDS = (REFERENCE, "cpu", "cuda")
PLACES = {
    "attention": ("attention:reference", "attention:blocked", "gpu.attention:flash"),
    "linear_cross_entropy": ("cross_entropy:reference", "cross_entropy:chunked", "gpu.cross_entropy:chunked"),
    "dropout": ("dropout:reference", "dropout:compiled", "gpu.bias_dropout_add:dropout"),
    "bias_gelu": ("bias_gelu:reference", "bias_gelu:compiled", "gpu.bias_gelu:fused"),
    "bias_dropout_add": ("dropout:bias_dropout_add", "dropout:compiled_bias_dropout_add", "gpu.bias_dropout_add:fused"),
    "masked_softmax": ("attention:masked_softmax", None, "gpu.masked_softmax:fused"),
    "dropout_bits": ("dropout:reference_bits", "dropout:compiled_bits", "gpu.masks:drawn_bits"),
}
"""module:function in `engine.kernels` for each of KINDS, if there is one."""
KERNELS |= {
    name: {kind: f"engine.kernels.{place}" for kind, place in zip(KINDS, places, strict=True) if place}
    for name, places in PLACES.items()
}
