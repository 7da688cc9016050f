"""`mlm-bench gpu`: one GPU's kernels and training beside torch.compile, the peers' models and the GPU's own limits.

Each contender has a process of its own, started anew in every round, so that none finds memory that another kept.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from engine.cli import read_run_config
from engine.config import ParallelConfig
from engine.costs import flops_per_token
from experiments.bench import timing
from experiments.bench.benchmarks.train import MASKED
from experiments.bench.contender import BenchSize, Contender, bench_size, left_out
from experiments.bench.timing import NOTES, Measured, Rounds, Timed, ratio, series, time_contender
from lineage.benchmark import Benchmark, Case, Series
from lineage.environment import list_gpus
from lineage.errors import HardwareMissing, UserError
from lineage.progress import announce
from lineage.shipped import model_file

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
    utilisation: float | None = None


MODELS = (Model("355m", 32, 0.50), Model("2.5b", 8, 0.58))
LARGEST = Model("8.3b", 8)
"""Alone, all layers recomputed: the optimizer's state, 14 bytes a parameter, does not fit."""
ITERATIONS, WARM_UP = 9, 3


def contenders() -> list[Contender]:
    """In the order in which every round measures them."""
    from experiments.bench.contenders.ours import build_ours
    from experiments.bench.contenders.peers import build_huggingface, build_nanogpt

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
    import torch

    from experiments.bench.contenders.kernels import check_kernels, measure_kernels, measure_limits
    from experiments.bench.contenders.ours import build_without_optimizer

    if not list_gpus():
        raise HardwareMissing("there is no NVIDIA GPU here: nothing was measured")
    if torch.version.cuda is None:
        raise HardwareMissing(f"torch {torch.__version__} is built without CUDA: nothing was measured")
    here = [each for each in contenders() if each.is_installed]
    announce(f"exactness and speed of kernels, then {rounds} rounds of {len(MODELS)} models by {len(here)} contenders")
    limits = in_new_process("limits", measure_limits)
    exactness = in_new_process("exactness", check_kernels)
    kernels = in_new_process("kernels", measure_kernels, limits)
    sizes = {model.name: _size(model) for model in MODELS}
    failures = {model.name: left_out(contenders()) for model in MODELS}

    def attempt(model: str, contender: Contender) -> Timed | None:
        """One round; None for a peer that failed, now or before."""
        if contender.name not in failures[model]:
            try:
                return in_new_process(contender.name, time_contender, contender, sizes[model], DROPOUT)
            except UserError as error:
                if contender.is_ours:
                    raise
                failures[model][contender.name] = str(error)
        return None

    measurements = {(name, each.name): partial(attempt, name, each) for name in sizes for each in here}
    taken, load = timing.in_turn("gpu", rounds, measurements)
    trained, disagreements = [], []
    for model in MODELS:
        measured = {each.name: [timed for timed in taken[model.name, each.name] if timed] for each in here}
        measured = {name: many for name, many in measured.items() if many}
        case, differing = summarize(model, sizes[model.name], measured, failures[model.name])
        trained.append(case)
        disagreements += differing
    size = _size(LARGEST)
    alone = Contender(OURS, 1, build_without_optimizer, parallel=ParallelConfig(recompute="full"))
    timed = in_new_process(LARGEST.name, time_contender, alone, size, DROPOUT)
    passes = replace(LARGEST, name=f"{LARGEST.name}, forward and backward")
    trained.append(summarize(passes, size, {OURS: [timed]}, {})[0])
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
        cases=[*kernels, *exactness, *trained],
        disagreements=disagreements,
        notes=[note.format(peak=PEAK_TFLOPS) for note in NOTES["gpu"]],
        setting={"rounds": rounds, "limits": limits},
        load_average=load,
    )


def _size(model: Model) -> BenchSize:
    """Its published recipe at full size in bf16."""
    config = read_run_config(model_file(model.name)).model
    return bench_size(model.name, config, model.batch, ITERATIONS, WARM_UP).in_precision("bf16")


def in_new_process(name: str, function: Any, *arguments: Any) -> Any:
    """What a function returns in a process of its own. Raises UserError naming what was measured when it fails."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except Exception as error:
            raise UserError(f"{name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}") from error


def summarize(model: Model, size: BenchSize, measured: Measured, failures: dict[str, str]) -> tuple[Case, list[str]]:
    """A trained model from every contender's rounds, and a sentence for each contender whose losses are not ours."""
    speed = timing.rates(size, measured)
    limits = [_peak_rate(size)] * len(speed[OURS])
    case = Case(
        name=model.name,
        series=_series(size, measured),
        ratios=[
            *(ratio(f"× {name}", speed[OURS], many, TO_PEERS) for name, many in speed.items() if name != OURS),
            ratio("utilisation", speed[OURS], limits, model.utilisation),
        ],
        missing=failures,
        losses=timing.first_losses(measured),
        setting=size.describe(),
    )
    return case, timing.differing_losses(model.name, measured, MASKED)


def _peak_rate(size: BenchSize) -> float:
    return PEAK_TFLOPS * 1e12 / flops_per_token(size.model, causal=True)


def _series(size: BenchSize, measured: Measured) -> list[Series]:
    return [
        each
        for name, many in timing.rates(size, measured).items()
        for each in (
            series(name, "rate", "tokens/s", *many),
            series(name, "utilisation", "", *(rate / _peak_rate(size) for rate in many)),
            series(name, "peak memory", "bytes", max(timed.peak_bytes for timed in measured[name])),
        )
    ]
