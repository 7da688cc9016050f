"""One GPU's kernels and training beside torch.compile, nanoGPT and the GPU's own limits, in stages of items.

Each item has a process and a time limit of its own and is written down when it ends, so that nothing is lost on a
machine that is lent for minutes.
"""

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from pydantic_core import to_json

from benchmarks import kernels
from benchmarks.contenders import Contender, OurLayout, Peer, Timed, time_contender
from benchmarks.kernels import KernelShape
from benchmarks.timing import (
    Measured,
    described_here,
    differing_losses,
    failure,
    first_losses,
    gpu_facts,
    load_average,
    rates,
    ratio,
    series,
)
from benchmarks.train import MASKED, TOLERANCES, describe, read_size, size_of
from engine.config import ModelConfig, ParallelConfig
from engine.costs import PARAMETER_BYTES, activation_bytes_per_layer, flops_per_token, parameter_count
from engine.launch.mesh import local_device
from engine.parallel.mesh import serial_mesh
from engine.run.resolved import read_run_config
from experiments.benchmark import Benchmark, Case, read_benchmark, write_benchmark
from experiments.iterations import TrainingSize, our_step
from lineage.environment import list_gpus
from lineage.errors import BadInput, HardwareMissing, UserError
from lineage.shipped import model_file

OURS = "ours"
CONTENDERS: tuple[Contender, ...] = (OurLayout(OURS), Peer("nanoGPT, torch.compile", is_compiled=True))
"""Contenders in the order in which every round measures them."""
TO_PEERS, PEER_ROUNDS = 1.3, 2
PEAK_TFLOPS = 989.0
"""Dense bf16 products of an H100 or H200 SXM, published by NVIDIA (H200 datasheet)."""
DROPOUT = 0.1
COMPARED_LOSSES = 2
"""Iterations whose losses are compared: later ones differ more, for masks of dropout are each contender's own."""
LEAST_SECONDS = 5.0
"""Time left before the deadline that an item needs to begin."""
SHOWN_KERNELS = 25
NOTES = [
    "tokens/s are those of an iteration: forward, backward, clipping, AdamW, bf16, dropout 0.1; of each round the "
    "median of its timed iterations. Ratios are medians over rounds of the ratio within a round.",
    f"Utilisation is of {PEAK_TFLOPS:g} TFLOP/s (published), by the operations of a token's products, forward and "
    "backward, attention halved for causality; recomputed ones are not counted.",
    "A kernel's floor is the time in which this GPU, in this run, copies the bytes that the kernel must read and "
    "write, or makes its products in bf16; forward and backward. Kernels are timed while the GPU has a queue of them.",
    "Losses are compared in the first two iterations; those of the tiny model, whose masks are the same, in all.",
    "nanoGPT trains under autocast to bf16 with torch.compile and fused AdamW; masks of dropout are its own.",
]


@dataclass(frozen=True)
class FullModel:
    """A model trained at full size, and the share of the peak set as its goal."""

    name: str
    batch: int
    """Sequences of an iteration, one microbatch."""
    utilisation: float | None = None


MODELS = (FullModel("355m", 32, 0.45), FullModel("2.5b", 8, 0.50))
BEST_UTILISATION = 0.58
"""The goal of 2.5b at its best microbatch and accumulation."""
ITERATIONS, WARM_UP, LONGEST = 6, 3, 20
MICROBATCHES, ACCUMULATIONS = (8, 16, 24), (1, 4, 8)


class StagedRun:
    """Items measured this time and, in the same folder, before."""

    def __init__(self, out: Path | None, deadline: float | None) -> None:
        """Continue the record in `out`, if it holds one; `deadline` is in seconds from now."""
        self.stage, self.out, self.failures = "", out, dict[str, str]()
        self._ends = time.monotonic() + deadline if deadline else float("inf")
        self._cases: dict[str, Case] = {}
        self._disagreements: dict[str, None] = {}
        self._load: list[float] = []
        if out:
            try:
                out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise BadInput(f"{out} cannot be made: {error.strerror}") from error
            if (out / "gpu.json").exists():
                before = read_benchmark(out / "gpu.json")
                self._cases = {case.name: case for case in before.cases}
                self._disagreements = dict.fromkeys(before.disagreements)

    def attempt(
        self, item: str, seconds: float, function: Callable[..., Any], *arguments: Any, keep: bool = False
    ) -> Any:
        """Return a function's result from a process of its own; None if it failed, or the time is over.

        With `keep` its cases join the record.
        """
        limit, start = min(seconds, self._ends - time.monotonic()), time.monotonic()
        value, why = None, ""
        try:
            if limit < LEAST_SECONDS:
                raise UserError("the deadline came first")
            value = in_new_process(limit, function, *arguments)
        except UserError as error:
            why = self.failures[item] = str(error)
        spent = round(time.monotonic() - start, 2)
        self.say(item, {"seconds": spent} | ({"failed": why} if why else {"result": value}))
        self._load.append(load_average())
        if keep:
            cases = value if isinstance(value, list) else [value] if value else []
            self.keep(*(cases or [Case(name=item, missing={OURS: why})]))
        return value

    def say(self, item: str, values: dict[str, Any]) -> None:
        """Write a line of JSON, on the terminal and into `gpu.jsonl`."""
        line = to_json({"stage": self.stage, "item": item} | values).decode()
        print(line, flush=True)
        if self.out:
            with (self.out / "gpu.jsonl").open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    def keep(self, *cases: Case) -> None:
        """Add cases to the record, in place of those of the same name."""
        self._cases |= {case.name: case for case in cases}
        if self.out:
            write_benchmark(self.out / "gpu.json", self.result)

    def disagree(self, *sentences: str) -> None:
        """Add sentences on wrong answers to the record."""
        self._disagreements |= dict.fromkeys(sentences)

    @property
    def result(self) -> Benchmark:
        """The record so far. Raises UserError if it is empty."""
        if not self._cases:
            reasons = "; ".join(f"{item}: {why}" for item, why in self.failures.items())
            raise UserError(f"nothing was measured: {reasons}")
        return Benchmark(
            benchmark="gpu",
            title="One GPU beside torch.compile, nanoGPT and its own limits",
            cases=list(self._cases.values()),
            disagreements=list(self._disagreements),
            notes=NOTES,
            setting=gpu_facts(),
            load_average=self._load,
            environment=described_here(),
        )


def in_new_process(seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return a function's result from a process of its own. Raises UserError if it fails or takes longer."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_answer, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            raise UserError(f"it took longer than {seconds:.0f} seconds")
        why, value = ours.recv()
    except EOFError as error:
        process.join()
        raise UserError(f"its process ended with code {process.exitcode}") from error
    finally:
        process.kill()
        process.join()
    if why:
        raise UserError(why)
    return value


def _answer(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send(("", function(*arguments)))
    except Exception as error:
        pipe.send((failure(error), None))


def measure(stage: str | None, out: Path | None, deadline: float | None) -> Benchmark:
    """Measure a stage, by default all. Raises BadInput for an unknown one and HardwareMissing without a GPU."""
    if stage and stage not in STAGES:
        raise BadInput(f"no stage is called {stage!r}; there are: {', '.join(STAGES)}")
    run = StagedRun(out, deadline)
    for name in [stage] if stage else STAGES:
        run.stage = name
        if missing := missing_hardware():
            run.say("hardware", {"missing": missing})
            raise HardwareMissing(f"{missing}: nothing was measured")
        STAGES[name](run)
    return run.result


def missing_hardware() -> str:
    """Return what a GPU's measurements need and this machine lacks; empty if nothing is missing."""
    if not list_gpus():
        return "there is no NVIDIA GPU here"
    return f"torch {torch.__version__} is built without CUDA" if torch.version.cuda is None else ""


def measure_first(run: StagedRun) -> None:
    """Measure the GPU's limits, each kernel's exactness and time, the tiny model's losses, then 355m and 2.5b alone."""
    shape = KernelShape()
    limits = run.attempt("limits", 120, kernels.measure_limits)
    if limits:
        run.keep(Case(name="limits", series=[series("GPU", name, "1/s", rate) for name, rate in limits.items()]))
    run.attempt("products of 2.5b", 120, kernels.measure_products, shape, keep=True)
    for dtype in ("bfloat16", "float16", "float32"):
        small = KernelShape(s=200, b=2, n=3, d=96, v=1000)
        for case in run.attempt(f"exactness {dtype}", 180, kernels.check_kernels, dtype, small, keep=True) or []:
            run.disagree(*(f"{case.name} has {each.value:.1f} times the reference's error"
                           for each in case.ratios if not each.is_reached))  # fmt: skip
            run.disagree(*(f"{case.name}: {why}" for why in case.missing.values()))
    if limits:
        run.attempt("kernels", 400, kernels.measure_kernels, limits, shape, keep=True)
    tiny = read_size("tiny")
    losses = {device: run.attempt(f"tiny, {device}", 120, losses_on, device, tiny) for device in ("cpu", "cuda")}
    if all(losses.values()):
        compared = {device: [Timed([1.0], each)] for device, each in losses.items()}
        run.keep(Case(name="tiny, the same masks on GPU and CPU", losses=first_losses(compared)))
        run.disagree(*differing_losses("tiny", compared, TOLERANCES["fp32"]))
    for model in MODELS:
        size = full_size(model)
        if timed := run.attempt(model.name, 180, time_contender, CONTENDERS[0], size, DROPOUT):
            run.keep(summarize(model, size, {OURS: [timed]}))
        run.attempt(f"kernels of an iteration, {model.name}", 180, profile, model.name, size, keep=True)


def measure_batches(run: StagedRun) -> None:
    """Measure attention's tiles, and 2.5b by microbatch and accumulation, the best of them for longer."""
    run.attempt("attention's tiles", 240, kernels.measure_tiles, KernelShape(), keep=True)
    memory = min(gpu["memory_bytes"] for gpu in list_gpus())
    best: tuple[float, FullModel, OurLayout] | None = None
    for count in ACCUMULATIONS:
        for b in MICROBATCHES:
            model = FullModel("2.5b", b * count)
            size = full_size(model, 2, 1)
            if bytes_held(size.model, b) > memory:
                continue
            ours = OurLayout(OURS, microbatches=count)
            if timed := run.attempt(f"2.5b, {b} × {count}", 150, time_contender, ours, size, DROPOUT):
                case = summarize(replace(model, name=f"2.5b, {b} × {count}"), size, {OURS: [timed]})
                run.keep(case)
                reached = case.ratios[-1].value
                if best is None or reached > best[0]:
                    best = reached, model, ours
    if best:
        _, model, ours = best
        size = full_size(model, LONGEST, WARM_UP)
        name = f"2.5b, best, {LONGEST} iterations"
        if timed := run.attempt(name, 400, time_contender, ours, size, DROPOUT):
            run.keep(summarize(FullModel(name, model.batch, BEST_UTILISATION), size, {OURS: [timed]}))


def measure_peers(run: StagedRun) -> None:
    """Measure every contender in turn, each model by itself."""
    for model in MODELS:
        size, failures = full_size(model), dict[str, str]()
        measured: dict[str, list[Timed]] = {each.name: [] for each in CONTENDERS}
        for number in range(1, PEER_ROUNDS + 1):
            for each in CONTENDERS:
                item = f"{model.name}, {each.name}, round {number}"
                if each.name in failures:
                    continue
                if timed := run.attempt(item, 240, time_contender, each, size, DROPOUT):
                    measured[each.name].append(timed)
                else:
                    failures[each.name] = run.failures[item]
        complete = {name: many for name, many in measured.items() if name not in failures}
        if OURS in complete:
            case = summarize(model, size, complete)
            run.keep(case.model_copy(update={"name": f"{model.name} beside peers", "missing": failures}))
            run.disagree(*differing_losses(model.name, complete, MASKED, COMPARED_LOSSES))


STAGES: dict[str, Callable[[StagedRun], None]] = {
    "first": measure_first, "batches": measure_batches, "peers": measure_peers
}  # fmt: skip


def full_size(model: FullModel, iterations: int = ITERATIONS, warm_up: int = WARM_UP) -> TrainingSize:
    """Return the model's published recipe at full size in bf16; the timed iterations come after the warm-up."""
    config = read_run_config(model_file(model.name)).model
    return size_of(config, model.batch, "bf16", warm_up + iterations, warm_up)


def bytes_held(model: ModelConfig, b: int) -> float:
    """Return the peak memory of training in bf16. Scores are not kept; the bits of attention's mask are."""
    state = sum(PARAMETER_BYTES["bf16"]) * parameter_count(model)
    held = activation_bytes_per_layer(model, b, ParallelConfig(recompute="selective"))
    return state + model.num_layers * (held + b * model.num_heads * model.seq_length**2 / 8)


def summarize(model: FullModel, size: TrainingSize, measured: Measured) -> Case:
    """Make a trained model's case from every contender's rounds."""
    speed = rates(size, measured)
    peak = PEAK_TFLOPS * 1e12 / flops_per_token(size.model, causal=True)
    return Case(
        name=model.name,
        series=[
            each
            for name, many in speed.items()
            for each in (
                series(name, "rate", "tokens/s", *many),
                series(name, "utilisation", "", *(rate / peak for rate in many)),
                series(name, "peak memory", "bytes", max(timed.peak_bytes for timed in measured[name])),
            )
        ],
        ratios=[
            *(ratio(f"× {name}", speed[OURS], many, TO_PEERS) for name, many in speed.items() if name != OURS),
            ratio("utilisation", speed[OURS], [peak] * len(speed[OURS]), model.utilisation),
        ],
        losses=first_losses(measured),
        setting=describe(size),
    )


def losses_on(device: str, size: TrainingSize) -> list[float]:
    """Train on a device with dropout and return every loss; the masks are the same on each device."""
    step = our_step(size, ParallelConfig(), serial_mesh(device), 1)
    return [step(iteration, DROPOUT) for iteration in range(size.train.iterations)]


def profile(name: str, size: TrainingSize) -> Case:
    """Return the milliseconds of the kernels that take the longest in an iteration, by torch's profiler."""
    step = our_step(size, ParallelConfig(), serial_mesh(local_device()), 1)
    for iteration in range(size.warm_up):
        step(iteration, DROPOUT)
    with torch.profiler.profile() as trace:
        step(size.warm_up, DROPOUT)
    longest = sorted(trace.key_averages(), key=lambda event: -event.self_device_time_total)[:SHOWN_KERNELS]
    return Case(
        name=f"kernels of an iteration, {name}",
        series=[
            series(event.key[:80], "time of an iteration", "ms", event.self_device_time_total / 1000)
            for event in longest
            if event.self_device_time_total
        ],
    )
