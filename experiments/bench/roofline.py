"""How long a GPT-2's iteration takes on one GPU at best: instructions issued, bytes moved and products, added up.

Nothing is measured and parts do not overlap. Shapes: s sequence, b microbatch, h hidden, v padded vocabulary.
"""

import math
from collections.abc import Mapping

from engine.config import ModelConfig, ParallelConfig
from engine.costs import PARAMETER_BYTES, activation_bytes_per_layer, flops_per_token, parameter_count
from experiments.bench.timing import NOTES, rounded, series
from experiments.simulator.cluster import Machine, load_cluster, machine_of
from lineage.benchmark import Benchmark, Case, Ratio

PEAK_TFLOPS = 989.0
"""Dense bf16 products of an H100 or H200 SXM, published by NVIDIA (H200 datasheet)."""
ISSUED_PER_SECOND = PEAK_TFLOPS * 1e12 / 4096 * 4
"""Instructions of warps: in a clock a multiprocessor issues 4, and multiplies and adds 4,096 times in bf16."""
PRODUCT_SHARE, COPY_SHARE = 0.667, 0.9
"""Assumed: the peak's share that products of these shapes reach, and that of the memory's bandwidth."""
HOST_SECONDS = 1e-3
"""Assumed: what the GPU waits for the host in an iteration."""
COMPILED_B = 8
"""Microbatch for which instructions are counted; they are in proportion to it."""
MICROBATCHES, ACCUMULATIONS = (8, 16, 24), (1, 4, 8)


CLUSTERS = {"H100": "h100", "H200": "h200"}
"""GPUs of the same processors, and the clusters whose files have their memory."""


def issued_instructions(model: ModelConfig) -> dict[str, float]:
    """Instructions of warps that each kernel issues in a launch for COMPILED_B sequences, compiled for sm_90 in bf16.

    It changes Triton for the whole process.
    """
    from experiments.bench.contenders.kernels import Shape, compile_not_interpret

    compile_not_interpret()
    import torch

    from engine.kernels.gpu import attention, bias_dropout_add, bias_gelu, cross_entropy
    from experiments.bench.contenders.compiled import compile_kernels

    s, d = model.seq_length, model.hidden_size // model.num_heads
    shape = Shape(s=s, b=COMPILED_B, n=model.num_heads, d=d, v=model.padded_vocab_size)
    compiled = {each.kernel: each for each in compile_kernels(90, torch.bfloat16, shape)}
    forward, to_query, to_key = attention.tiles_for(d, torch.bfloat16)
    columns = math.ceil(shape.v / cross_entropy.COLUMNS)
    rounds = {
        "attention forward": _seen(s, forward.queries, forward.keys),
        "attention to_query": _seen(s, to_query.queries, to_query.keys),
        "attention to_key_value": _seen(s, to_key.keys, to_key.queries),
        "layer_norm gradient": s * COMPILED_B / compiled["layer_norm gradient"].programs,
        "bias_gelu bias_gelu_gradient": bias_gelu.STEPS,
        "bias_dropout_add gradient": bias_dropout_add.STEPS,
        "linear_cross_entropy log_sum": 2 * columns,
    }
    programs = {
        "linear_cross_entropy log_sum": s * COMPILED_B,
        "attention draw": compiled["attention draw"].programs / 2,
    }
    return {
        name: programs.get(name, each.programs) * each.warps
        * (each.instructions + each.in_loop * (rounds.get(name, 1) - 1))
        for name, each in compiled.items()
    }  # fmt: skip


def _seen(s: int, own: int, other: int) -> float:
    """Tiles of `other` rows that a tile of `own` rows meets under a causal mask, on average."""
    met = [math.ceil(min(first + own, s) / other) for first in range(0, s, own)]
    return sum(met) / len(met)


def modelled(
    models: Mapping[str, ModelConfig], issued: Mapping[str, dict[str, float]], goals: Mapping[str, float]
) -> Benchmark:
    """Parts of an iteration of each model on each GPU, for each microbatch and accumulation that fits.

    `issued` has each model's `issued_instructions`; a model's goal is that of its best case
    on each GPU.
    """
    cases = []
    for name, model in models.items():
        for gpu, cluster in CLUSTERS.items():
            machine = machine_of(load_cluster(cluster))
            here = [
                _case(f"{name}, {gpu}, {b} × {count}", model, issued[name], machine, b, count)
                for b in MICROBATCHES
                for count in ACCUMULATIONS
                if bytes_held(model, b) <= machine.memory_bytes
            ]
            best = max(range(len(here)), key=lambda place: here[place].ratios[0].value)
            reached = here[best].ratios[0].model_copy(update={"goal": goals.get(name)})
            here[best] = here[best].model_copy(update={"ratios": [reached]})
            cases += here
    return Benchmark(
        benchmark="gpu-model",
        title="Iterations on one GPU, modelled",
        cases=cases,
        notes=[note.format(peak=PEAK_TFLOPS, product=PRODUCT_SHARE, copy=COPY_SHARE) for note in NOTES["gpu-model"]],
        setting={"host": f"{1000 * HOST_SECONDS:g} ms an iteration"},
    )


def bytes_held(model: ModelConfig, b: int) -> float:
    """Of training in bf16 at its fullest. Scores are not kept; the bits of attention's mask are."""
    state = sum(PARAMETER_BYTES["bf16"]) * parameter_count(model)
    kept = activation_bytes_per_layer(model, b, ParallelConfig(recompute="selective"))
    return state + model.num_layers * (kept + b * model.num_heads * model.seq_length**2 / 8)


def _case(name: str, model: ModelConfig, issued: dict[str, float], machine: Machine, b: int, count: int) -> Case:
    spent = seconds_of_parts(model, issued, machine, b, count)
    rate = b * count * model.seq_length / sum(spent.values())
    share = rate * flops_per_token(model, causal=True) / (PEAK_TFLOPS * 1e12)
    return Case(
        name=name,
        series=[
            *(series(part, "time", "ms", 1000 * taken, kind="computed") for part, taken in spent.items()),
            series("memory", "held", "bytes", round(bytes_held(model, b)), kind="computed"),
        ],
        ratios=[Ratio(name="modelled share of the peak", value=rounded(share))],
    )  # fmt: skip


def seconds_of_parts(
    model: ModelConfig, issued: dict[str, float], machine: Machine, b: int, count: int
) -> dict[str, float]:
    """Each part of an iteration of `count` microbatches. A kernel takes as long as its bytes or its instructions."""
    from engine.kernels.gpu.attention import width_of
    from engine.kernels.gpu.cross_entropy import CHUNK_BYTES

    s, h, v, layers = model.seq_length, model.hidden_size, model.padded_vocab_size, model.num_layers
    tokens, parameters, bandwidth = b * s, parameter_count(model), COPY_SHARE * machine.memory_bytes_per_second
    product_rate = PRODUCT_SHARE * PEAK_TFLOPS * 1e12
    stream = 2 * tokens * h / bandwidth  # to read or to write the residual stream

    def kernel(name: str, streams: float) -> float:
        return max(streams * stream, issued[name] * b / COMPILED_B / ISSUED_PER_SECOND)

    per_layer = {
        "products": 72 * tokens * h * h / product_rate,
        "attention": 14 * tokens * s * h / product_rate  # 7 products; whole tiles of which half is seen, rows padded
        * (width_of(h // model.num_heads) * model.num_heads / h) / 2
        + kernel("attention draw", s / 16 / (2 * h / model.num_heads)) + kernel("attention inner", 2)
        + kernel("attention forward", 4) + kernel("attention to_query", 5) + kernel("attention to_key_value", 6),
        "layer norm": 2 * (kernel("layer_norm normalize", 2) + kernel("layer_norm gradient", 3)),
        "bias, GeLU": kernel("bias_gelu bias_gelu", 8) + kernel("bias_gelu bias_gelu_gradient", 12),
        "bias, dropout, residual": 2
        * (kernel("bias_dropout_add bias_dropout_add", 3) + kernel("bias_dropout_add gradient", 2)),
        "sums of gradients of residual and bias": 9 * stream,
    }  # fmt: skip
    chunks = math.ceil(2 * tokens * v / CHUNK_BYTES)
    logits = max(
        8 * tokens * v / bandwidth, issued["linear_cross_entropy log_sum"] * b / COMPILED_B / ISSUED_PER_SECOND
    )
    head = 6 * tokens * h * v / product_rate + logits + chunks * 12 * h * v / bandwidth
    spent = {part: count * layers * taken for part, taken in per_layer.items()}
    return spent | {
        "head and loss": count * head,
        "gradients into fp32": (6 + 10 * (count - 1)) * parameters / bandwidth,
        "norm, AdamW": (4 + 30) * parameters / bandwidth,
        "host": HOST_SECONDS,
    }
