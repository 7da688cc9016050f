"""Parameters, floating-point operations and bytes in closed form. Imports no torch."""

from typing import NamedTuple

from data_pipeline.tokens.special_tokens import MASKED_SHARE
from engine.batch_schedule import BatchSchedule
from engine.config import ModelConfig, ParallelConfig, Precision, TrainConfig


class ParameterBytes(NamedTuple):
    """Bytes of one parameter's parts."""

    weight: int
    """As it is computed with; of an activation's element too."""
    gradient: int
    moments: int
    master: int


PARAMETER_BYTES: dict[Precision, ParameterBytes] = {
    "fp64": ParameterBytes(8, 8, 16, 0),
    "fp32": ParameterBytes(4, 4, 8, 0),
    "bf16": ParameterBytes(2, 4, 8, 4),
    "fp16": ParameterBytes(2, 4, 8, 4),
    "fp16-pure": ParameterBytes(2, 2, 4, 0),
}


def parameter_count(model: ModelConfig) -> int:
    """Every trainable number: embeddings, layers with biases and layer norms, final layer norm.

    2021 paper, Equation 2, without its rounding: 12Lh²(1 + 13/(12h)) + (V + s)h + 2h. A Transformer-XL's by its shapes.
    """
    if model.family == "transformer-xl":
        return _transformer_xl_parameters(model)
    h = model.hidden_size
    per_layer = 12 * h * h + 13 * h
    count = model.num_layers * per_layer + (model.padded_vocab_size + model.seq_length) * h + 2 * h
    if model.family == "bert":  # segments; dense, norm and bias of the masked head; pooler; sentence order
        count += 2 * h + (h * h + 3 * h + model.padded_vocab_size) + (h * h + h) + (2 * h + 2)
    return count


def flops_per_iteration(model: ModelConfig, train: TrainConfig, recompute: bool = False) -> float:
    """Floating-point operations of one iteration's matrix products, forward and backward.

    72·B·s·L·h²·(1 + s/6h + V/12Lh), or with full activation recomputation the 2021 paper's Equation 3,
    96·B·s·L·h²·(1 + s/6h + V/16Lh). Attention is not halved for causality, as in the papers. A Transformer-XL's memory
    counts as part of its segment where keys and values are made of it; a tail of its softmax counts for nothing. A
    BERT has a dense product before its logits, which it computes for masked tokens alone.
    """
    if model.family == "transformer-xl":
        return train.global_batch_size * (4 if recompute else 3) * _transformer_xl_forward_flops(model)
    h, layers, s, v = model.hidden_size, model.num_layers, model.seq_length, model.padded_vocab_size
    factor = 96 if recompute else 72
    columns = v * MASKED_SHARE + h if model.family == "bert" else v
    logits = columns / ((16 if recompute else 12) * layers * h)
    return factor * train.global_batch_size * s * layers * h * h * (1 + s / (6 * h) + logits)


def _transformer_xl_parameters(model: ModelConfig) -> int:
    h, xl, width, inner = model.hidden_size, model.transformer_xl, model.num_heads * model.head_dim, model.inner_size
    per_layer = 5 * h * width + 2 * width + 2 * h * inner + inner + h + 4 * h
    if not xl.cutoffs:
        return model.num_layers * per_layer + model.padded_vocab_size * h
    bounds = (0, *xl.cutoffs, model.vocab_size)
    widths = [h // xl.div_value**cluster for cluster in range(len(bounds) - 1)]
    words = sum((high - low) * w for low, high, w in zip(bounds, bounds[1:], widths, strict=False))
    return model.num_layers * per_layer + words + h * sum(widths[1:]) + len(xl.cutoffs) * h


def _transformer_xl_forward_flops(model: ModelConfig) -> float:
    """Of one sequence: products with weights, scores by content and by distance, values, output head."""
    h, s, width = model.hidden_size, model.seq_length, model.num_heads * model.head_dim
    keys = s + model.transformer_xl.memory_length
    head = min((*model.transformer_xl.cutoffs, model.padded_vocab_size))
    per_layer = 2 * h * width * (3 * keys + s) + 6 * s * keys * width + 4 * s * h * model.inner_size
    return model.num_layers * per_layer + 2 * s * h * head


def tokens_trained(model: ModelConfig, train: TrainConfig) -> int:
    """Tokens seen in the whole run."""
    return BatchSchedule(train).samples_before(train.iterations) * model.seq_length


def state_bytes_per_parameter(precision: Precision) -> int:
    """Bytes of parameter, master weight, accumulated gradient and Adam moments per parameter."""
    return sum(PARAMETER_BYTES[precision])


def activation_bytes_per_layer(model: ModelConfig, microbatch_size: int, parallel: ParallelConfig) -> float:
    """Bytes one layer keeps of one microbatch for its backward pass, at 2 bytes per element.

    Korthikanti et al. 2022 (arXiv 2205.05198), Table 2: sbh(10 + 24/t + 5as/ht); selective recomputation drops the last
    term, full recomputation keeps the layer's input, 2sbh.
    """
    s, b, h, a, t = model.seq_length, microbatch_size, model.hidden_size, model.num_heads, parallel.tp
    if parallel.recompute == "full":
        return 2 * s * b * h / parallel.recompute_layers
    scores = 7 if model.family == "transformer-xl" else 5  # by content and by distance
    keys = s + model.transformer_xl.memory_length
    attention = 0 if parallel.recompute == "selective" else scores * a * keys / (h * t)
    return s * b * h * (10 + 24 / t + attention)


def rank_memory_bytes(
    model: ModelConfig, train: TrainConfig, parallel: ParallelConfig, dp: int = 1
) -> dict[str, float]:
    """Bytes of the first pipeline rank, which keeps the most: `state` and `activations`.

    State is parameters, gradients and optimizer of its layers and the embedding, divided by tp; a sharded optimizer's
    moments and master weights are divided by dp as well, under ZeRO stage 3 all of it. Activations are those
    of every microbatch in flight and, without a pipeline, the logits.
    """
    h, tp = model.hidden_size, parallel.tp
    layers = -(-model.num_layers // parallel.pp)
    if model.family != "transformer-xl":
        embedding = (model.padded_vocab_size / tp + model.seq_length) * h
        parameters = layers * (12 * h * h + 13 * h) / tp + embedding
    else:
        parameters = parameter_count(model.model_copy(update={"num_layers": layers})) / tp
    in_flight = microbatches_in_flight(parallel, train.global_batch_size // train.microbatch_size)
    each = PARAMETER_BYTES[train.precision]
    optimizer = each.moments + each.master
    owners, holders = (dp if parallel.shard_optimizer else 1), (dp if parallel.shard_parameters else 1)
    per_layer = activation_bytes_per_layer(model, train.microbatch_size, parallel)
    logits = 4 * model.seq_length * train.microbatch_size * h * (1 + model.padded_vocab_size / (h * tp))
    return {
        "state": parameters / holders * (sum(each) - optimizer * (1 - 1 / owners)),
        "activations": each.weight / 2 * (layers * per_layer * in_flight + (logits if parallel.pp == 1 else 0)),
    }


def microbatches_in_flight(parallel: ParallelConfig, microbatches: int) -> float:
    """Microbatches whose activations the first pipeline rank keeps at once, in whole-rank units.

    GPipe keeps all m, 1F1B at most p, interleaving p·(1 + (p − 1)/(p·v)) (2021 paper, Section 2.2).
    """
    p, v = parallel.pp, parallel.chunks
    if parallel.schedule == "gpipe":
        return microbatches
    most = p if v == 1 else p * (1 + (p - 1) / (p * v))
    return min(microbatches, most)


def checkpoint_bytes(model: ModelConfig, precision: Precision) -> int:
    """Size of one checkpoint: parameters, two moments and, below fp32, master weights."""
    each = PARAMETER_BYTES[precision]
    return parameter_count(model) * (each.weight + each.moments + each.master)
