"""How long a GPT-2's iteration takes on one GPU at best: instructions issued, bytes moved and products, added up.

Nothing is measured and parts do not overlap. Shapes: s sequence, b microbatch, h hidden, v padded vocabulary.
"""

import math
from itertools import product

import torch

from benchmarks.gpu import ACCUMULATIONS, MICROBATCHES, MODELS, PEAK_TFLOPS, bytes_held, in_new_process
from benchmarks.kernels import KernelShape
from benchmarks.timing import rounded, series
from engine.config import ModelConfig, RunConfig
from engine.costs import flops_per_token, parameter_count
from engine.run.resolved import read_run_config
from experiments.benchmark import Benchmark, Case, Ratio
from experiments.simulator.cluster import Machine, load_cluster, machine_of
from experiments.simulator.planner import OWN
from experiments.simulator.simulate import iteration_parts
from experiments.simulator.workload import Workload
from lineage.extras import import_extra
from lineage.shipped import model_file

ISSUED_PER_SECOND = PEAK_TFLOPS * 1e12 / 4096 * 4
"""Instructions of warps: in a clock a multiprocessor issues 4, and multiplies and adds 4,096 times in bf16."""
PRODUCT_SHARE, COPY_SHARE = 0.667, 0.9
"""Assumed shares of the peak that products reach in an iteration, and of the memory's bandwidth. Alone, on an H200,
products reach 0.74 to 0.83 and copies 0.89 (results/bench/gpu.json)."""
ATTENTION_SHARE = 0.18
"""Share of the peak that attention's kernels reach with dropout on an H200, at head dims of 96 and 128, with the
padding of their tiles (results/bench/gpu.json)."""
HOST_SECONDS = 12e-3
"""Time in an iteration in which an H200 runs no kernel (results/bench/gpu.json)."""
ISSUED = ("bias_gelu", "bias_dropout_add", "linear_cross_entropy")
"""Kernels whose instructions are counted."""
COMPILED_B = 8
"""Microbatch for which instructions are counted; they are in proportion to it."""
NOTES = [
    f"Computed: products at {PRODUCT_SHARE:g} of {PEAK_TFLOPS:g} TFLOP/s, attention at {ATTENTION_SHARE:g}, other "
    f"kernels as long as their bytes take at {COPY_SHARE:g} of the published bandwidth or their compiled instructions "
    "to be issued, one part after the other. The shares of products and bandwidth are assumptions.",
    "The share of the peak is by the operations of a token's products, forward and backward, attention halved for "
    "causality. Left out: the embedding, sums of the parts of small gradients, launches that leave the GPU idle.",
]


def measure() -> Benchmark:
    """Model iterations of 355m and 2.5b on an H100 and an H200, at each microbatch and accumulation that fits."""
    import_extra("triton", "gpu")
    cases = []
    for name in MODELS:
        run = read_run_config(model_file(name))
        model = run.model
        issued = in_new_process(300.0, issued_instructions, model)
        for gpu, b, count in product(("H100", "H200"), MICROBATCHES, ACCUMULATIONS):
            machine = machine_of(load_cluster(gpu.lower()))
            if bytes_held(model, b) <= machine.memory_bytes:
                spent = seconds_of_parts(model, issued, machine, b, count)
                rate = b * count * model.seq_length / sum(spent.values())
                share = rate * flops_per_token(model, causal=True) / (PEAK_TFLOPS * 1e12)
                parts = [series(part, "time", "ms", 1000 * each, kind="computed") for part, each in spent.items()]
                simulated = simulated_seconds(run, gpu.lower(), b, count) / sum(spent.values())
                ratios = [Ratio(name="modelled share of the peak", value=rounded(share)),
                          Ratio(name="simulated over modelled time", value=rounded(simulated))]  # fmt: skip
                cases.append(Case(name=f"{name}, {gpu}, {b} × {count}", series=parts, ratios=ratios))
    return Benchmark(benchmark="gpu-model", title="Iterations on one GPU, modelled", cases=cases, notes=NOTES)


def simulated_seconds(run: RunConfig, cluster: str, b: int, count: int) -> float:
    """Return the time that the simulator gives this iteration on one GPU under this engine."""
    own = Workload.of_run(run, 1)._replace(tp=1, pp=1, chunks=1, dp=1, zero=0, sequence_parallel=0, recompute="none")
    workload = own._replace(micro_batch=b, global_batch=b * count)
    return float(iteration_parts(machine_of(load_cluster(cluster, OWN)), [workload]).total[0])


def issued_instructions(model: ModelConfig) -> dict[str, float]:
    """Return the instructions of warps that ISSUED issue for COMPILED_B sequences, compiled for sm_90 in bf16.

    It changes Triton for the whole process.
    """
    from benchmarks.compiled import compile_kernels
    from engine.kernels.gpu import bias_dropout_add, bias_gelu, cross_entropy

    s, d = model.seq_length, model.hidden_size // model.num_heads
    shape = KernelShape(s=s, b=COMPILED_B, n=model.num_heads, d=d, v=model.padded_vocab_size)
    compiled = {each.kernel: each for each in compile_kernels(90, torch.bfloat16, shape, ISSUED)}
    rounds = {
        "bias_gelu bias_gelu_gradient": bias_gelu.STEPS,
        "bias_dropout_add gradient": bias_dropout_add.STEPS,
        "linear_cross_entropy log_sum": 2 * math.ceil(shape.v / cross_entropy.COLUMNS),
    }
    programs = {"linear_cross_entropy log_sum": s * COMPILED_B}
    return {
        name: programs.get(name, each.programs) * each.warps
        * (each.instructions + each.in_loop * (rounds.get(name, 1) - 1))
        for name, each in compiled.items()
    }  # fmt: skip


def seconds_of_parts(
    model: ModelConfig, issued: dict[str, float], machine: Machine, b: int, count: int
) -> dict[str, float]:
    """Return each part of an iteration of `count` microbatches. A kernel takes as long as its bytes or instructions."""
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
        "attention": 7 * tokens * s * h / (ATTENTION_SHARE * PEAK_TFLOPS * 1e12)  # 7 products, of which half is seen
        * (width_of(h // model.num_heads) * model.num_heads / h),
        "layer norm": 10 * stream,
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
        "head and loss": count * head, "gradients into fp32": (6 + 10 * (count - 1)) * parameters / bandwidth,
        "norm, AdamW": (4 + 8 + 28 + 6) * parameters / bandwidth, "host": HOST_SECONDS,
    }  # fmt: skip
