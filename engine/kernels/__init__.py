"""The kernels: each a reference in plain torch, and what is faster on a device and computes the same."""

from engine.kernels.registry import KERNELS, REFERENCE

KINDS = (REFERENCE, "cpu", "cuda")
PLACES = {
    "attention": ("attention:reference", "attention:blocked", "gpu.attention:flash"),
    "linear_cross_entropy": ("cross_entropy:reference", "cross_entropy:chunked", "gpu.cross_entropy:chunked"),
    "dropout": ("dropout:reference", "dropout:compiled", "gpu.bias_dropout_add:dropout"),
    "bias_gelu": ("bias_gelu:reference", "bias_gelu:compiled", "gpu.bias_gelu:fused"),
    "bias_dropout_add": ("bias_dropout_add:reference", "bias_dropout_add:compiled", "gpu.bias_dropout_add:fused"),
    "layer_norm": ("layer_norm:reference", None, "gpu.layer_norm:fused"),
    "masked_softmax": ("masked_softmax:reference", None, "gpu.masked_softmax:fused"),
    "adamw": ("adam:reference", "adam:compiled", "gpu.adam:fused"),
    "adam_direction": ("adam:reference_direction", "adam:compiled_direction", "gpu.adam:fused_direction"),
    "dropout_bits": ("dropout_bits:reference", "dropout_bits:compiled", "gpu.dropout_bits:fused"),
}
"""module:function below `engine.kernels` of each of KINDS, where there is one."""
KERNELS |= {
    name: {kind: f"engine.kernels.{place}" for kind, place in zip(KINDS, places, strict=True) if place}
    for name, places in PLACES.items()
}
