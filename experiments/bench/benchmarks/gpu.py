"""`mlm-bench gpu`: one GPU's kernels and training beside torch.compile, the peers' models and the GPU's own limits.

What is measured is divided into stages, each of items that have a process and a time limit of their own: on a machine
that is lent for minutes nothing that was measured is lost.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from engine.config import ParallelConfig
from engine.run.resolved import read_run_config
from experiments.bench import timing
from experiments.bench.benchmarks.train import MASKED
from experiments.bench.contender import TOLERANCE, BenchSize, Contender, bench_size, left_out, read_size
from experiments.bench.timing import Measured, Rounds, ratio, series, time_contender
from lineage.benchmark import Benchmark, Case, Series
from lineage.environment import list_gpus
from lineage.errors import HardwareMissing
from lineage.extras import import_extra
from lineage.shipped import model_file

if TYPE_CHECKING:
    from experiments.bench.stage import Stage

OURS = "ours"
TO_PEERS = 1.3
DROPOUT = 0.1
COMPARED_LOSSES = 2
"""Iterations whose losses are compared: later ones differ more, for masks of dropout are each contender's own."""


@dataclass(frozen=True)
class Model:
    """A model trained at full size, and the share of the peak set as its goal."""

    name: str
    batch: int
    """Sequences of an iteration, one microbatch."""
    utilisation: float | None = None


MODELS = (Model("355m", 32, 0.45), Model("2.5b", 8, 0.50))
LARGEST = Model("8.3b", 8)
"""Alone, all layers recomputed: the optimizer's state does not fit."""
BEST_UTILISATION, MODELLED = 0.58, 0.52
"""Goals of 2.5b: at its best microbatch and accumulation, measured and modelled."""
ITERATIONS, WARM_UP = 6, 3
MICROBATCHES, ACCUMULATIONS, LONGEST = (8, 16, 24), (1, 4, 8), 20
TEXT_SECONDS, TEXT_BATCH = 420.0, 32

StageName = Literal["first", "batches", "peers", "text"]


def contenders() -> list[Contender]:
    """In the order in which every round measures them."""
    from experiments.bench.contenders.ours import build_ours
    from experiments.bench.contenders.peers import build_huggingface, build_nanogpt

    return [
        Contender(OURS, 1, build_ours, is_ours=True),
        Contender("nanoGPT-style, torch.compile", 1, build_nanogpt, is_compiled=True),
        Contender("Hugging Face GPT-2, torch.compile", 1, build_huggingface, is_compiled=True, needs="transformers"),
    ]


def measure(
    rounds: Rounds = 1,
    stage: Annotated[StageName | None, typer.Option(help="Only this one of the stages; see docs/gpu.md.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write gpu.jsonl, a line for each item when it ends, and gpu.json into it.")
    ] = None,
    deadline: Annotated[float | None, typer.Option(min=1, help="End after so many seconds.")] = None,
    model: Annotated[bool, typer.Option("--model", help="Compute what a GPU could reach; needs none.")] = False,
) -> Benchmark:
    """Kernels and training on one GPU beside torch.compile, the peers' models and the GPU's own limits.

    Ends with code 4 where there is no GPU, with 3 if a kernel is not exact or losses differ.
    """
    from experiments.bench.stage import Stage

    if model:
        return model_iterations()
    run = Stage(out, deadline)
    for name in [stage] if stage else STAGES:
        run.begin(name)
        if missing := missing_hardware():
            run.say("hardware", {"missing": missing})
            raise HardwareMissing(f"{missing}: nothing was measured")
        STAGES[name](run, rounds)
    return run.result


def missing_hardware() -> str:
    """What is not here that a GPU's measurements need; empty where nothing is missing."""
    import torch

    if not list_gpus():
        return "there is no NVIDIA GPU here"
    return f"torch {torch.__version__} is built without CUDA" if torch.version.cuda is None else ""


def model_iterations() -> Benchmark:
    """Iterations of 355m and 2.5b on an H100 and an H200, from compiled kernels and closed forms."""
    from experiments.bench.roofline import issued_instructions, modelled
    from experiments.bench.stage import in_new_process

    import_extra("triton", "gpu")
    models = {each.name: read_run_config(model_file(each.name)).model for each in MODELS}
    issued = {name: in_new_process(300.0, issued_instructions, each) for name, each in models.items()}
    return modelled(models, issued, {"2.5b": MODELLED})


def measure_first(stage: "Stage", rounds: int) -> None:
    """Whether it runs and is exact, what the GPU can do, each kernel, then 355m and 2.5b alone."""
    from experiments.bench.contenders import kernels
    from experiments.bench.contenders.ours import losses_on, profile

    limits = stage.attempt("limits", 120, kernels.measure_limits)
    if limits:
        stage.keep(Case(name="limits", series=[series("GPU", name, "1/s", rate) for name, rate in limits.items()]))
    stage.attempt("products of 2.5b", 120, kernels.measure_products, keep=True)
    for dtype in ("bfloat16", "float16", "float32"):
        for case in stage.attempt(f"exactness {dtype}", 180, kernels.check_kernels, dtype, keep=True) or []:
            stage.disagree(*(f"{case.name} has {each.value:.1f} times the reference's error"
                             for each in case.ratios if not each.is_reached))  # fmt: skip
            stage.disagree(*(f"{case.name}: {why}" for why in case.missing.values()))
    if limits:
        stage.attempt("kernels", 400, kernels.measure_kernels, limits, keep=True)
    tiny = read_size("tiny")
    losses = {
        device: stage.attempt(f"tiny, {device}", 120, losses_on, device, tiny, DROPOUT) for device in ("cpu", "cuda")
    }
    if all(losses.values()):
        compared = {device: [timing.Timed([1.0], each)] for device, each in losses.items()}
        stage.keep(Case(name="tiny, the same masks on GPU and CPU", losses=timing.first_losses(compared)))
        stage.disagree(*timing.differing_losses("tiny", compared, TOLERANCE))
    ours = contenders()[0]
    for each in MODELS:
        size = size_of(each)
        if timed := stage.attempt(each.name, 180, time_contender, ours, size, DROPOUT):
            stage.keep(summarize(each, size, {OURS: [timed]}, {})[0])
        stage.attempt(f"kernels of an iteration, {each.name}", 180, profile, size, DROPOUT, keep=True)


def measure_batches(stage: "Stage", rounds: int) -> None:
    """Attention's tiles; 2.5b by microbatch and accumulation, the best for longer; 8.3b without an optimizer."""
    from experiments.bench.contenders import kernels
    from experiments.bench.contenders.ours import build_without_optimizer
    from experiments.bench.roofline import bytes_held

    stage.attempt("attention's tiles", 240, kernels.measure_tiles, keep=True)
    ours, memory = contenders()[0], min(gpu["memory_bytes"] for gpu in list_gpus())
    best: tuple[float, Model, Contender] | None = None
    for count in ACCUMULATIONS:
        for b in MICROBATCHES:
            model = Model("2.5b", b * count)
            size = size_of(model, 2, 1)
            if bytes_held(size.model, b) > memory:
                continue
            contender = replace(ours, microbatches=count)
            timed = stage.attempt(f"2.5b, {b} × {count}", 150, time_contender, contender, size, DROPOUT)
            if timed is None:
                continue
            case = summarize(replace(model, name=f"2.5b, {b} × {count}"), size, {OURS: [timed]}, {})[0]
            stage.keep(case)
            reached = case.ratios[-1].value
            if best is None or reached > best[0]:
                best = reached, model, contender
    if best:
        _, model, contender = best
        size = size_of(model, LONGEST, WARM_UP)
        name = f"2.5b, best, {LONGEST} iterations"
        if timed := stage.attempt(name, 400, time_contender, contender, size, DROPOUT):
            stage.keep(summarize(Model(name, model.batch, BEST_UTILISATION), size, {OURS: [timed]}, {})[0])
    alone, size = (
        Contender(OURS, 1, build_without_optimizer, parallel=ParallelConfig(recompute="full")),
        size_of(LARGEST),
    )
    if timed := stage.attempt(LARGEST.name, 240, time_contender, alone, size, DROPOUT):
        passes = replace(LARGEST, name=f"{LARGEST.name}, forward and backward")
        stage.keep(summarize(passes, size, {OURS: [timed]}, {})[0])


def measure_peers(stage: "Stage", rounds: int) -> None:
    """Every contender in turn, `rounds` times, each model by itself; then the kernels under compute-sanitizer."""
    from experiments.bench.contenders.kernels import sanitize

    here = [each for each in contenders() if each.is_installed]
    for model in MODELS:
        size, failures = size_of(model), left_out(contenders())
        measured: dict[str, list[timing.Timed]] = {each.name: [] for each in here}
        for number in range(1, rounds + 1):
            for each in here:
                if each.name not in failures:
                    item = f"{model.name}, {each.name}, round {number}"
                    if timed := stage.attempt(item, 240, time_contender, each, size, DROPOUT):
                        measured[each.name].append(timed)
                    else:
                        failures[each.name] = stage.failures[item]
        measured = {name: many for name, many in measured.items() if many}
        if OURS in measured:
            case, differing = summarize(model, size, measured, failures)
            stage.keep(case.model_copy(update={"name": f"{model.name} beside peers"}))
            stage.disagree(*differing)
    stage.attempt("compute-sanitizer", 240, sanitize)


def measure_text(stage: "Stage", rounds: int) -> None:
    """355m on the text of this machine's Python packages, byte by byte, for as long as is left."""
    from experiments.bench.contenders.ours import train_on_text

    seconds = min(TEXT_SECONDS, stage.seconds_left - 60)
    size = size_of(Model("355m", TEXT_BATCH), 1, 0)
    stage.attempt("355m on text", seconds + 60, train_on_text, size, DROPOUT, seconds, keep=True)


STAGES: "dict[str, Callable[[Stage, int], None]]" = {
    "first": measure_first, "batches": measure_batches, "peers": measure_peers, "text": measure_text
}  # fmt: skip


def size_of(model: Model, iterations: int = ITERATIONS, warm_up: int = WARM_UP) -> BenchSize:
    """Its published recipe at full size in bf16; so many timed iterations come after the warm-up."""
    config = read_run_config(model_file(model.name)).model
    return bench_size(model.name, config, model.batch, warm_up + iterations, warm_up).in_precision("bf16")


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
    first = {name: [replace(each, losses=each.losses[:COMPARED_LOSSES]) for each in many]
             for name, many in measured.items()}  # fmt: skip
    return case, timing.differing_losses(model.name, first, MASKED)


def _peak_rate(size: BenchSize) -> float:
    from engine.costs import flops_per_token
    from experiments.bench.roofline import PEAK_TFLOPS

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
