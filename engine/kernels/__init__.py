"""The kernels: each a reference in plain torch, and what is faster on a device and computes the same."""

from engine.kernels.registry import KERNELS, REFERENCE

KERNELS |= {
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
