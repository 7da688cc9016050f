"""`mlm-bench gpu`: one GPU's kernels and training beside torch.compile, the peers' models and the GPU's own limits.

Each contender has a process of its own, started anew in every round, so that none finds memory that another kept.
"""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

from engine.costs import flops_per_token
from experiments.bench.benchmarks.train import MASKED
from experiments.bench.contender import Contender
from experiments.bench.contenders import left_out
from experiments.bench.gpu_kernels import check_kernels, measure_kernels, measure_limits
from experiments.bench.ours import build_ours
from experiments.bench.peers import build_huggingface, build_nanogpt
from experiments.bench.sizes import BenchSize, published_size
from experiments.bench.timing import Measured, Rounds, differing_losses, finite, ratio, series, time_contender
from lineage.benchmark import Benchmark, Case, Series
from lineage.environment import list_gpus
from lineage.errors import HardwareMissing, UserError
from lineage.progress import Progress, announce

OURS = "ours"
PEAK_TFLOPS = 989.0
"""Dense bf16 products of an H100 or H200 SXM, published by NVIDIA (H200 datasheet)."""
TO_PEERS = 1.15
DROPOUT = 0.1


@dataclass(frozen=True)
class Model:
    """A model trained at full size, and the share of the peak set as its goal."""

    name: str
    batch: int
    """Sequences of an iteration, one microbatch."""
    utilisation: float


MODELS = (Model("355m", 32, 0.50), Model("2.5b", 8, 0.58))
LARGEST = ("8.3b", 8)
"""Forward and backward alone, all layers recomputed: its optimizer's state, 14 bytes a parameter, does not fit."""
ITERATIONS, WARM_UP = 9, 3


def contenders() -> list[Contender]:
    """In the order in which every round measures them."""
    return [
        Contender(OURS, 1, build_ours, is_ours=True),
        Contender("nanoGPT-style, torch.compile", 1, build_nanogpt, is_compiled=True),
        Contender("Hugging Face GPT-2, torch.compile", 1, build_huggingface, is_compiled=True, needs="transformers"),
    ]


def measure(rounds: Rounds = 3) -> Benchmark:
    """Kernels and training on one GPU beside torch.compile, the peers' models and the GPU's own limits.

    Exactness of each kernel, its time beside what copying or products allow, then training of 355m and 2.5b, and
    forward and backward of 8.3b. Ends with code 4 where there is no GPU, with 3 if a kernel is not exact or losses
    differ.
    """
    _check_gpu()
    here = [each for each in contenders() if each.is_installed]
    trained, disagreements = [], []
    announce(f"exactness and speed of kernels, then {rounds} rounds of {len(MODELS)} models by {len(here)} contenders")
    with Progress("gpu", 2 + rounds * len(MODELS) * len(here) + 1, "measurements") as progress:
        limits = in_new_process("limits", measure_limits)
        exactness = in_new_process("exactness", check_kernels)
        progress.advance(1, "exactness")
        kernels = in_new_process("kernels", measure_kernels, limits)
        progress.advance(1, "kernels")
        for model in MODELS:
            size = published_size(model.name, model.batch, ITERATIONS, WARM_UP)
            measured: dict[str, list[Measured]] = {each.name: [] for each in here}
            failures = left_out(contenders())
            for _ in range(rounds):
                for each in here:
                    if each.name not in failures:
                        try:
                            measured[each.name].append(in_new_process(each.name, measure_steps, each, size))
                        except UserError as error:
                            if each.is_ours:
                                raise
                            failures[each.name] = str(error)
                    progress.advance(1, f"{model.name}: {each.name}")
            case, differing = summarize(model, size, {name: many for name, many in measured.items() if many}, failures)
            trained.append(case)
            disagreements += differing
        name, batch = LARGEST
        size = published_size(name, batch, ITERATIONS, WARM_UP)
        largest = summarize_largest(size, in_new_process(name, measure_forward_backward, size))
        progress.advance(1, name)
    disagreements += [
        f"{case.name} has {each.value:.1f} times the reference's error"
        for case in exactness
        for each in case.ratios
        if not each.is_reached
    ]
    disagreements += [f"{case.name}: {why}" for case in exactness for why in case.missing.values()]
    return Benchmark(
        benchmark="gpu",
        title="One GPU beside torch.compile, the peers' models and its own limits",
        cases=[*kernels, *exactness, *trained, largest],
        disagreements=disagreements,
        notes=list(NOTES),
        setting={"rounds": rounds, "limits": limits},
    )


def _check_gpu() -> None:
    import torch

    if not list_gpus():
        raise HardwareMissing("there is no NVIDIA GPU here: nothing was measured")
    if torch.version.cuda is None:
        raise HardwareMissing(f"torch {torch.__version__} is built without CUDA: nothing was measured")


def in_new_process(name: str, function: Any, *arguments: Any) -> Any:
    """What a function returns in a process of its own. Raises UserError naming what was measured when it fails."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except Exception as error:
            raise UserError(f"{name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}") from error


def measure_steps(contender: Contender, size: BenchSize) -> Measured:
    """Training iterations on this process's device."""
    from engine.guard.memory import PeakMemory
    from engine.launch.mesh import local_device

    memory = PeakMemory(local_device())
    timed = time_contender(contender, size, [DROPOUT])[0]
    return Measured(timed.seconds, timed.losses, memory.bytes())


def measure_forward_backward(size: BenchSize) -> Measured:
    """Forward and backward of our model with every layer recomputed, without an optimizer."""
    import time

    import torch

    from engine.config import ParallelConfig
    from engine.guard.memory import PeakMemory
    from engine.launch.mesh import local_device
    from engine.model.microbatch import PipelineInput
    from engine.optim.precision import DTYPES
    from engine.parallel.mesh import serial_mesh
    from engine.pipeline.partition import PartitionedModel
    from engine.rng import Dropout

    mesh, train = serial_mesh(local_device()), size.train
    memory = PeakMemory(mesh.device)
    parallel = ParallelConfig(recompute="full")
    chunk = PartitionedModel(size.model, parallel, mesh, DTYPES[train.precision], train.seed).chunks[0]
    seconds, losses = [], []
    for iteration in range(train.iterations):
        start = time.perf_counter()
        tokens = torch.from_numpy(size.batch(iteration)).to(mesh.device)
        masks = Dropout(DROPOUT, train.seed, iteration, tuple(range(len(tokens))))
        batch = PipelineInput(tokens[:, :-1], tokens[:, 1:], masks)
        loss = chunk.batch_loss(chunk.run_stage(batch.tokens, batch), batch)
        loss.backward()
        chunk.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    return Measured(seconds[size.warm_up :], losses, memory.bytes())


def summarize(
    model: Model, size: BenchSize, measured: dict[str, list[Measured]], failures: dict[str, str]
) -> tuple[Case, list[str]]:
    """A trained model from every contender's rounds, and a sentence for each contender whose losses are not ours."""
    rates = {name: [size.tokens / median(sample.seconds) for sample in many] for name, many in measured.items()}
    limits = [PEAK_TFLOPS * 1e12 / flops_per_token(size.model, causal=True)] * len(rates[OURS])
    losses = {name: [sample.losses for sample in many] for name, many in measured.items()}
    case = Case(
        name=model.name,
        series=[part for name, many in rates.items() for part in _series(size, name, many, measured[name])],
        ratios=[
            *(ratio(f"× {name}", rates[OURS], many, TO_PEERS) for name, many in rates.items() if name != OURS),
            ratio("utilisation", rates[OURS], limits, model.utilisation),
        ],
        missing=failures,
        losses={name: finite(many[0]) for name, many in losses.items()},
        setting=size.describe(),
    )
    return case, differing_losses(model.name, losses, MASKED)


def summarize_largest(size: BenchSize, measured: Measured) -> Case:
    """What is not trained: forward and backward alone."""
    return Case(
        name=f"{LARGEST[0]}, forward and backward",
        series=_series(size, OURS, [size.tokens / median(measured.seconds)], [measured]),
        losses={OURS: finite(measured.losses)},
        setting=size.describe() | {"optimizer": "none: forward and backward alone, every layer recomputed"},
    )


def _series(size: BenchSize, name: str, rates: Sequence[float], rounds: Sequence[Measured]) -> list[Series]:
    peak = PEAK_TFLOPS * 1e12 / flops_per_token(size.model, causal=True)
    return [
        series(name, "rate", "tokens/s", *rates),
        series(name, "utilisation", "", *(rate / peak for rate in rates)),
        series(name, "peak memory", "bytes", max(sample.peak_bytes for sample in rounds)),
    ]


NOTES = (
    "tokens/s are those of an iteration: forward, backward, clipping, AdamW, bf16, dropout 0.1; of each round the "
    "median of its timed iterations. Ratios are medians over rounds of the ratio within a round.",
    f"Utilisation is of {PEAK_TFLOPS:g} TFLOP/s (published), by the operations of a token's products, forward and "
    "backward, attention halved for causality; recomputed ones are not counted.",
    "A kernel's floor is the time in which this GPU, in this run, copies the bytes that it must read and write, or "
    "makes its products in bf16; forward and backward.",
    "The peers train under autocast to bf16 with torch.compile and fused AdamW; masks of dropout are their own.",
)
