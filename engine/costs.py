"""Closed forms for parameters, FLOPs and bytes, which every program uses. Imports no torch.

Shapes: b microbatch, s sequence, h hidden, L layers, v padded vocabulary, t tensor-parallel ranks.
"""

from typing import NamedTuple

from mlm_repro.engine.batch_schedule import BatchSchedule
from mlm_repro.engine.config import ModelConfig, ParallelConfig, Precision, TrainConfig
from mlm_repro.engine.family import family_of
from mlm_repro.engine.parallel.layout import PipelineStage, split_layers
from mlm_repro.engine.pipeline.schedule import peaks_in_flight


class ParameterBytes(NamedTuple):
    """Bytes that training in one precision holds for each parameter: weight, gradient, both of
    Adam's moments together, and the fp32 master copy, 0 if there is none."""

    weight: int
    """Bytes of a weight in the forward pass, and of an activation's element."""
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
"""Dict number format → ParameterBytes of this engine. Every optimizer keeps two moments."""
MEGATRON_BYTES = ParameterBytes(2, 2, 8, 4)
"""ParameterBytes of Megatron-LM, 2019 to 2021, with fp16 gradients (ZeRO, arXiv:1910.02054, Section
3.1)."""


class RankMemory(NamedTuple):
    """Peak memory in bytes of each tensor-parallel rank of one pipeline rank, whose number is the
    field `rank`. Its parts are the fields `state`, for parameters, gradients and optimizer,
    `activations`, and `copied`, for the copy from which a checkpoint is written, 0 by default;
    `total` is their sum."""

    state: int
    """Bytes of parameters, gradients and optimizer state."""
    activations: int
    rank: int
    copied: int = 0
    """Bytes of the state's copy from which a checkpoint is written; 0 on a GPU, whose copy lies in
    the host's memory, and 0 as `memory_of_ranks` gives it, which does not count the copy."""

    @property
    def total(self) -> int:
        """Peak memory of the rank in bytes, the sum of its three parts: state, activations, and the
        copy of the state that a checkpoint is written from."""
        return self.state + self.activations + self.copied


def parameter_count(model: ModelConfig) -> int:
    """Return the number of parameters of the whole model, with embeddings, biases and layer norms.
    The vocabulary is the padded one, but for a Transformer-XL with cutoffs the real one.

    For GPT-2 it is the 2021 paper's Equation 2 without rounding: 12Lh²(1 + 13/(12h)) + (v + s)h +
    2h.
    """
    return family_of(model).closed_forms(model).parameters(PipelineStage(range(model.num_layers)))


def flops_per_token(model: ModelConfig, recompute: bool = False, causal: bool = False) -> float:
    """Return the FLOPs of the model's matrix products, forward and backward, for one token of a
    full sequence, on average.

    With `recompute` the layers' forward pass counts twice. Attention counts in full, as in the
    papers; with `causal` the half of a sequence's own scores that a causal mask hides is left out.
    A BERT has no such mask, so for it `causal` changes nothing.
    """
    return family_of(model).closed_forms(model).flops(1, recompute, causal) / model.seq_length


def flops_per_iteration(model: ModelConfig, train: TrainConfig, recompute: bool = False) -> float:
    """Return the FLOPs of the model's matrix products for one batch of `train.global_batch_size`
    sequences, also if the batch still grows, forward and backward, with attention counted in full,
    as in the papers. With `recompute` the layers' forward pass counts twice."""
    return (
        family_of(model).closed_forms(model).flops(train.global_batch_size, recompute, causal=False)
    )


def tokens_trained(model: ModelConfig, train: TrainConfig) -> int:
    """Return the number of tokens in all samples of the run that `model` and `train` configure,
    from its beginning to iteration `train.iterations`, its configured end, repeated tokens
    included. If the run continues another, the samples of that run count too, each as one sequence
    of `model`."""
    return BatchSchedule(train).samples_before(train.iterations) * model.seq_length


def state_bytes_per_parameter(precision: Precision, parallel: ParallelConfig, dp: int = 1) -> float:
    """Return the bytes of weight, gradient and optimizer state in the number format `precision`
    that a rank holds per parameter of its part of the model; `dp` is the number of data-parallel
    ranks.

    ZeRO stage 1 (`parallel.shard_optimizer`) divides moments and master weights over the
    data-parallel ranks, stage 3 (`parallel.shard_parameters`) everything.
    """
    sizes = PARAMETER_BYTES[precision]
    owners = dp if parallel.shard_optimizer else 1
    holders = dp if parallel.shard_parameters else 1
    return (sizes.weight + sizes.gradient + (sizes.moments + sizes.master) / owners) / holders


def activation_bytes_per_layer(
    model: ModelConfig, microbatch_size: int, parallel: ParallelConfig
) -> float:
    """Return the bytes that a layer keeps of one microbatch of `microbatch_size` sequences for
    backward on one tensor-parallel rank, at 2 bytes per element.

    Korthikanti et al. 2022 (arXiv 2205.05198), Table 2: sbh(10 + 24/t + 5as/ht) for sequence length
    s, microbatch size b, hidden size h, a attention heads and t tensor-parallel ranks; the last
    term is 7a(m + s)/ht for a Transformer-XL with a memory of m positions. With
    `parallel.recompute` selective the last term is dropped. With full recomputation only the input
    of each group of layers is kept, 2sbh over the number of layers in it. Sequence parallelism
    divides the first term, and that input, by t.
    """
    s = model.seq_length
    b = microbatch_size
    h = model.hidden_size
    a = model.num_heads
    t = parallel.tp
    rest = 1 / t if parallel.sequence_parallel else 1
    if parallel.recompute == "full":
        return 2 * s * b * h * rest / parallel.recompute_layers
    score_bytes = (
        0
        if parallel.recompute == "selective"
        else family_of(model).closed_forms(model).score_bytes()
    )
    return s * b * h * (10 * rest + 24 / t + score_bytes * a / (h * t))


def memory_of_ranks(
    model: ModelConfig, train: TrainConfig, parallel: ParallelConfig, dp: int = 1
) -> list[RankMemory]:
    """Return a list with a RankMemory for each pipeline rank, in order: the peak bytes of state and
    of activations on one of its tensor-parallel ranks, in closed form, without the copy for a
    checkpoint. The batch and precision are from `train`, the layout and recomputation from
    `parallel`. `dp` is the number of data-parallel ranks.

    A rank holds the activations of forward passes that await their backward pass (2021 paper,
    Section 2.2), and the activations that one recomputation restores. The last rank also holds the
    inputs of final layer norm and output head, and logits in fp32, or in fp64 if that is the
    precision. Raises BadInput if layers or microbatches do not fit the pipeline.
    """
    costs = family_of(model).closed_forms(model)
    b = train.microbatch_size
    s = model.seq_length
    element = PARAMETER_BYTES[train.precision].weight
    stored = activation_bytes_per_layer(model, b, parallel)
    whole = activation_bytes_per_layer(model, b, parallel.model_copy(update={"recompute": "none"}))
    recomputed = (parallel.recompute_layers if parallel.recompute == "full" else 1) * (
        whole - stored
    )
    head = (
        s
        * b
        * (2 * element * model.hidden_size + max(element, 4) * costs.head_columns() / parallel.tp)
    )
    state_bytes = state_bytes_per_parameter(train.precision, parallel, dp)
    microbatches = train.global_batch_size // (b * dp)
    waiting = peaks_in_flight(parallel.schedule, parallel.pp, parallel.chunks, microbatches)
    ranks = []
    for rank, own in enumerate(_stages_of_ranks(model, parallel)):
        layers = sum(len(stage.layers) for stage in own) / parallel.chunks
        parameters = _parameters(model, parallel, own)
        activations = element / 2 * (waiting[rank] * layers * stored + recomputed) + (
            head if own[-1].is_last else 0
        )
        ranks.append(RankMemory(round(parameters * state_bytes), round(activations), rank))
    return ranks


def fullest_rank(
    model: ModelConfig, train: TrainConfig, parallel: ParallelConfig, dp: int = 1
) -> RankMemory:
    """Return the RankMemory of the pipeline rank whose peak in closed form, without a checkpoint's
    copy, is largest in total, with the batch and precision of `train` and the layout and
    recomputation of `parallel`; `dp` is the number of data-parallel ranks. Raises BadInput if
    layers or microbatches do not fit the pipeline."""
    return max(memory_of_ranks(model, train, parallel, dp), key=lambda memory: memory.total)


def checkpoint_bytes(model: ModelConfig, precision: Precision) -> int:
    """Return the number of bytes in the tensors of a whole checkpoint of a model that trains in the
    number format `precision`: parameters, two moments and, in bf16 and fp16, master weights."""
    sizes = PARAMETER_BYTES[precision]
    return parameter_count(model) * (sizes.weight + sizes.moments + sizes.master)


def written_bytes(
    model: ModelConfig, precision: Precision, parallel: ParallelConfig, dp: int = 1
) -> int:
    """Return the largest number of bytes that one rank writes of a checkpoint, for training in the
    number format `precision` with the layout `parallel`: the weights of its part of the model, and
    1/`dp` of that part's optimizer state, where `dp` is the number of data-parallel ranks. Raises
    BadInput if there are fewer layers than pipeline stages.

    Tensors are written whole, so a rank may write up to one tensor's state more. Under ZeRO stage 3
    a rank writes 1/`dp` of the weights too.
    """
    sizes = PARAMETER_BYTES[precision]
    largest = max(_parameters(model, parallel, own) for own in _stages_of_ranks(model, parallel))
    weight = sizes.weight / (dp if parallel.shard_parameters else 1)
    return round(largest * (weight + (sizes.moments + sizes.master) / dp))


def _stages_of_ranks(model: ModelConfig, parallel: ParallelConfig) -> list[list[PipelineStage]]:
    """Return a list that has for each pipeline rank of the layout `parallel`, in order, a list of
    the PipelineStages of `model` that it holds, one for each of its `chunks`: rank r of pp holds
    the stages r, r + pp and so on. Raises BadInput if there are fewer layers than stages."""
    stages = split_layers(model.num_layers, parallel.pp, parallel.chunks)
    return [stages[rank :: parallel.pp] for rank in range(parallel.pp)]


def _parameters(model: ModelConfig, parallel: ParallelConfig, stages: list[PipelineStage]) -> float:
    """Return the number of parameters of `model` that one of `parallel.tp` tensor-parallel ranks
    holds of the PipelineStages in `stages`, all together."""
    costs = family_of(model).closed_forms(model)
    return sum(costs.parameters(stage, parallel.tp) for stage in stages)
