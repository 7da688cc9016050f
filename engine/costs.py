"""Parameters, floating-point operations and bytes in closed form. Imports no torch."""

from engine.config import ModelConfig, Precision, TrainConfig


def parameter_count(model: ModelConfig) -> int:
    """Every trainable number: embeddings, layers with biases and layer norms, final layer norm.

    2021 paper, Equation 2, without its rounding: 12Lh²(1 + 13/(12h)) + (V + s)h + 2h.
    """
    h = model.hidden_size
    per_layer = 12 * h * h + 13 * h
    return model.num_layers * per_layer + (model.padded_vocab_size + model.seq_length) * h + 2 * h


def flops_per_iteration(model: ModelConfig, train: TrainConfig, recompute: bool = False) -> float:
    """Floating-point operations of one iteration's matrix products, forward and backward.

    72·B·s·L·h²·(1 + s/6h + V/12Lh), or with full activation recomputation the 2021 paper's Equation 3,
    96·B·s·L·h²·(1 + s/6h + V/16Lh). Attention is not halved for causality, as in the papers.
    """
    h, layers, s, v = model.hidden_size, model.num_layers, model.seq_length, model.padded_vocab_size
    factor = 96 if recompute else 72
    logits = v / ((16 if recompute else 12) * layers * h)
    return factor * train.global_batch_size * s * layers * h * h * (1 + s / (6 * h) + logits)


def tokens_trained(model: ModelConfig, train: TrainConfig) -> int:
    """Tokens seen in the whole run."""
    return train.iterations * train.global_batch_size * model.seq_length


def state_bytes_per_parameter(precision: Precision) -> int:
    """Bytes of parameter, gradient, master weight, accumulated gradient and Adam moments per parameter."""
    return {"fp64": 32, "fp32": 16, "bf16": 2 + 2 + 4 + 4 + 8, "fp16": 2 + 2 + 4 + 4 + 8}[precision]


def activation_bytes(model: ModelConfig, microbatch_size: int, tp: int = 1) -> float:
    """Activations of one microbatch kept for the backward pass, sbhL(10 + 24/t + 5as/ht) and the logits.

    Korthikanti et al. 2022 (arXiv 2205.05198), Table 2, without recomputation, 2 bytes per element.
    """
    s, b, h, a = model.seq_length, microbatch_size, model.hidden_size, model.num_heads
    layer = s * b * h * (10 + 24 / tp + 5 * a * s / (h * tp))
    return model.num_layers * layer + 4 * s * b * h * (1 + model.padded_vocab_size / (h * tp))


def rank_memory_bytes(model: ModelConfig, train: TrainConfig, tp: int = 1) -> float:
    """Model and optimizer state of one rank (sharded by tp) plus one microbatch's activations."""
    scale = {"fp64": 4, "fp32": 2, "bf16": 1, "fp16": 1}[train.precision]
    state = parameter_count(model) * state_bytes_per_parameter(train.precision) / tp
    return state + scale * activation_bytes(model, train.microbatch_size, tp)


def checkpoint_bytes(model: ModelConfig, precision: Precision) -> int:
    """Size of one checkpoint: parameters, two moments and, below fp32, master weights."""
    return parameter_count(model) * {"fp64": 24, "fp32": 12, "bf16": 14, "fp16": 14}[precision]
