"""One GPU's kernels and training beside torch.compile, nanoGPT and the GPU's own limits, item by item.

Each item has a process and a time limit of its own and is written down when it ends, so that nothing is lost on a
machine that is lent for minutes.
"""

import multiprocessing
import os
import random
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic_core import to_json

from benchmarks import kernels
from benchmarks.contenders import Contender, OurLayout, Peer, Timed, TrainingSize, time_contender
from benchmarks.kernels import OURS, KernelShape
from benchmarks.timing import (
    Measured,
    described_here,
    differing_losses,
    failure,
    first_losses,
    gpu_facts,
    rates,
    ratio,
    series,
)
from benchmarks.train import MASKED, TOLERANCES, read_size, size_of
from mlm_repro.data_pipeline.tokens.token_file import TokenFileWriter, token_dtype
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer, padded_vocab_size
from mlm_repro.engine.costs import flops_per_token
from mlm_repro.engine.run.files import read_steps
from mlm_repro.engine.run.resolved import read_run_config
from mlm_repro.experiments.benchmark import Benchmark, Case, read_benchmark, write_benchmark
from mlm_repro.lineage.atomic import write_json
from mlm_repro.lineage.digest import seal
from mlm_repro.lineage.environment import describe_environment, list_gpus, source_state
from mlm_repro.lineage.errors import BadInput, HardwareMissing, Interrupted, UserError
from mlm_repro.lineage.processes import end_with_parent
from mlm_repro.lineage.shipped import model_file

CONTENDERS: tuple[Contender, ...] = (OurLayout(OURS), Peer("nanoGPT, torch.compile", is_compiled=True))
TO_PEERS = 1.3
PEAK_TFLOPS = 989.0
"""Dense bf16 products of an H100 or H200 SXM, published by NVIDIA (H200 datasheet)."""
DROPOUT = 0.1
COMPARED_LOSSES = 2
LEAST_SECONDS = 5.0
"""Time left before the deadline that an item needs to begin."""
NOTES = [
    "tokens/s are those of an iteration: forward, backward, clipping, AdamW, bf16, dropout 0.1 unless the name says "
    "otherwise; the median of the timed iterations.",
    f"Utilisation is of {PEAK_TFLOPS:g} TFLOP/s (published), by the operations of a token's products, forward and "
    "backward, attention halved for causality; recomputed ones are not counted.",
    "A kernel's floor is the time in which this GPU, in this run, copies the bytes that the kernel must read and "
    "write, or makes its products in bf16; forward and backward. Kernels are timed while the GPU has a queue of them.",
    "Losses are compared in the first two iterations; those of the tiny model, whose masks are the same, in all.",
    "nanoGPT trains under autocast to bf16 with torch.compile and fused AdamW; masks of dropout are its own, so that "
    "later losses differ more.",
]
MODELS = {"355m": 0.42, "2.5b": 0.45}
"""Models trained at full size, and the share of the peak that is each one's goal."""
BEST_UTILISATION = 0.50
"""The goal of 2.5b at its best accumulation."""
ITERATIONS, WARM_UP = 6, 3
TRIED = (
    "name=tried model.num_layers=4 model.hidden_size=128 model.num_heads=4 model.seq_length=128 train.iterations=200 "
    "train.warmup_iterations=0 train.decay=cosine train.global_batch_size=8 train.microbatch_size=8 "
    "train.precision=bf16 train.validation_interval=1000 train.validation_samples=8 train.checkpoint_interval=1000"
)
"""The run with which `mlm-train` is tried."""
Result = Sequence[Case | str]


class ItemRecord:
    """Items measured this time and, in the same folder, before."""

    def __init__(self, out: Path | None, deadline: float | None) -> None:
        """Continue the record in `out`, if it holds one; `deadline` is in seconds from now."""
        self.out = out
        self._ends = time.monotonic() + (deadline or float("inf"))
        self._cases: dict[str, Case] = {}
        self._disagreements: dict[str, None] = {}
        self.done: dict[str, str] = {}
        """Items of the record, each with the commit that it was measured at."""
        if out:
            try:
                out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise BadInput(f"{out} cannot be made: {error.strerror}") from error
            if (out / "gpu.json").exists():
                before = read_benchmark(out / "gpu.json")
                self._cases = {case.name: case for case in before.cases}
                self._disagreements = dict.fromkeys(before.disagreements)
                self.done = dict(before.setting["done"])

    def attempt(self, name: str, seconds: float, measure: Callable[[], Result]) -> None:
        """Measure an item; its cases join the record, and a line for each is written, or one with the reason."""
        limit, start = min(seconds, self._ends - time.monotonic()), time.monotonic()
        try:
            if limit < LEAST_SECONDS:
                raise UserError("the deadline came first")
            results = in_new_process(limit, measure)
        except UserError as error:
            self.say(name, failed=str(error), seconds=round(time.monotonic() - start, 2))
            return
        self.done[name] = source_state().get("commit") or "unknown"
        self._disagreements |= dict.fromkeys(each for each in results if isinstance(each, str))
        for case in (each for each in results if isinstance(each, Case)):
            self._cases[case.name] = case
            self.say(name, seconds=round(time.monotonic() - start, 2), case=case)
        if self.out:
            write_benchmark(self.out / "gpu.json", self.result)

    def say(self, name: str, **values: Any) -> None:
        """Write a line of JSON, on the terminal and into `gpu.jsonl`."""
        line = to_json({"item": name} | values).decode()
        print(line, flush=True)
        if self.out:
            with (self.out / "gpu.jsonl").open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    @property
    def result(self) -> Benchmark:
        """The record so far. Raises UserError if it is empty."""
        if not self._cases:
            raise UserError("nothing was measured: every item's line has its reason")
        title = "One GPU beside torch.compile, nanoGPT and its own limits"
        return Benchmark(
            benchmark="gpu", title=title, cases=list(self._cases.values()), disagreements=list(self._disagreements),
            notes=NOTES, setting=gpu_facts() | {"done": self.done}, environment=described_here(),
        )  # fmt: skip


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
        traceback.print_exc()
        pipe.send((failure(error), None))


def measure(chosen: str, out: Path | None, deadline: float | None) -> Benchmark:
    """Measure items, `all` or some with commas between them, in the order of their worth; those of `out` are done.

    Raises BadInput for an unknown one and HardwareMissing without a GPU.
    """
    names = list(ITEMS) if chosen == "all" else chosen.split(",")
    if unknown := [name for name in names if name not in ITEMS]:
        raise BadInput(f"no item is called {unknown[0]!r}; there are: {', '.join(ITEMS)}")
    record, missing = ItemRecord(out, deadline), ""
    if not list_gpus():
        missing = "there is no NVIDIA GPU here"
    elif torch.version.cuda is None:
        missing = f"torch {torch.__version__} is built without CUDA"
    for name in (name for name in ITEMS if name in names):
        if missing:
            record.say(name, missing=missing)
        elif name not in record.done:
            record.attempt(name, *ITEMS[name])
    if missing:
        raise HardwareMissing(f"{missing}: nothing was measured")
    return record.result


def versions() -> Result:
    """Return what the machine is made of."""
    return [Case(name="versions", setting=gpu_facts() | describe_environment().to_json())]


def compile_kernels() -> Result:
    """Run every kernel once in a process of its own, on all cores: Triton keeps what it compiles."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda name: in_new_process(85, kernels.run_once, name, KernelShape()), kernels.KERNELS))
    return [Case(name="compiled", setting={"kernels": kernels.KERNELS})]


def compare_tiny() -> Result:
    """Train the tiny model on GPU and CPU with dropout, whose masks are the same."""
    size, losses = read_size("tiny"), {}
    for device in ("cpu", "cuda"):
        step = OurLayout(OURS).build(size, torch.device(device))
        losses[device] = [Timed([1.0], [step(iteration, DROPOUT) for iteration in range(size.train.iterations)])]
    case = Case(name="tiny, the same masks on GPU and CPU", losses=first_losses(losses))
    return [case, *differing_losses("tiny", losses, TOLERANCES["fp32"])]


def train_alone(name: str, b: int, count: int = 1, dropout: float = DROPOUT, is_profiled: bool = False) -> Result:
    """Train a model at full size with `count` microbatches of `b` sequences; `is_profiled` adds its kernels."""
    size = full_size(name, b * count, *((ITERATIONS, WARM_UP) if count == 1 else (2, 1)))
    timed = time_contender(OurLayout(OURS, microbatches=count), size, dropout)
    title = f"{name}, {b} × {count}" + ("" if dropout else ", without dropout")
    case = summarize(title, size, {OURS: [timed]}, BEST_UTILISATION if count > 1 else MODELS[name])
    return [case, *([profile(name, size)] if is_profiled else [])]


def compare_peers(name: str, b: int) -> Result:
    """Train a model with every contender in turn."""
    size = full_size(name, b)
    measured = {each.name: [time_contender(each, size, DROPOUT)] for each in CONTENDERS}
    case = summarize(f"{name} beside peers", size, measured, MODELS[name])
    return [case, *differing_losses(name, measured, MASKED, COMPARED_LOSSES)]


def try_program() -> Result:
    """Train with `mlm-train` in bf16, stop it by SIGTERM, resume it, and compare the losses with the processor's."""
    losses: dict[str, list[Timed]] = {}
    with TemporaryDirectory() as folder:
        dataset = write_dataset(Path(folder) / "data")
        settings = [f"--set={each}" for each in (*TRIED.split(), f"data.dataset={dataset}")]
        command = [sys.executable, "-m", "mlm_repro.engine.cli", "run", "355m", "--ranks=1", *settings]
        for device, variables in (("cpu", {"CUDA_VISIBLE_DEVICES": ""}), ("cuda", {})):
            runs = Path(folder) / device
            begin = partial(subprocess.Popen, [*command, f"--runs={runs}"], env=os.environ | variables,
                            stdout=sys.stderr, preexec_fn=end_with_parent)  # fmt: skip
            if device == "cuda":
                stopped = begin()
                while stopped.poll() is None and not any(map(read_steps, runs.glob("tried-*"))):
                    time.sleep(0.01)
                stopped.terminate()
                if stopped.wait() != Interrupted.exit_code:
                    raise UserError(f"mlm-train ended with code {stopped.returncode} after SIGTERM")
            if code := begin().wait():
                raise UserError(f"mlm-train ended with code {code} on {device}")
            losses[device] = [Timed([1.0], [step.loss for step in read_steps(next(runs.glob("tried-*")))])]
    case = Case(name="mlm-train, stopped and resumed, beside the CPU", losses=first_losses(losses))
    return [case, *differing_losses("mlm-train", losses, MASKED)]


def write_dataset(directory: Path) -> Path:
    """Write a dataset of random letters, and return its directory."""
    texts = ["".join(random.Random(number).choices("abcdefgh ", k=200)) for number in range(600)]
    tokenizer = Tokenizer.train(texts, 290)
    tokenizer.save(directory / "tokenizer")
    for split, part in (("train", texts[:500]), ("valid", texts[500:])):
        with TokenFileWriter(directory / f"{split}_text_document", token_dtype(290)) as writer:
            for text in part:
                writer.add_document([*tokenizer.encode(text), tokenizer.end_of_text])
    made = {"name": "letters", "seed": 0, "tokenizer": {"kind": "train", "digest": tokenizer.digest}}
    sizes = {"vocab_size": tokenizer.vocab_size, "padded_vocab_size": padded_vocab_size(tokenizer.vocab_size)}
    write_json(directory / "dataset.json", made | sizes)
    seal(directory)
    return directory


SMALL = KernelShape(s=200, b=2, n=3, d=96, v=1000)
LONG = KernelShape(s=4096, b=2, n=1, d=64, v=51200)
"""The shape of a real head: n = 8,192 tokens and a vocabulary of 51,200."""
ITEMS: dict[str, tuple[float, Callable[[], Result]]] = {
    "versions": (40, versions),
    "compile": (90, compile_kernels),
    "tiny": (45, compare_tiny),
    "2.5b": (100, partial(train_alone, "2.5b", 8, 1, DROPOUT, True)),
    "2.5b-8x8": (60, partial(train_alone, "2.5b", 8, 8)),
    "mlm-train": (90, try_program),
    "limits": (40, partial(kernels.describe_limits, KernelShape())),
    "attention": (60, partial(kernels.measure_kernel, "attention", KernelShape())),
    "exact-bf16": (45, partial(kernels.check_kernels, torch.bfloat16, SMALL)),
    "exact-fp16": (45, partial(kernels.check_kernels, torch.float16, SMALL)),
    "exact-fp16-head": (45, partial(kernels.check_kernels, torch.float16, LONG, ("linear_cross_entropy",))),
    "exact-fp32": (45, partial(kernels.check_kernels, torch.float32, SMALL)),
    "355m": (45, partial(train_alone, "355m", 32, 1, DROPOUT, True)),
    "nanogpt": (180, partial(compare_peers, "355m", 32)),
    "2.5b-dropout-0": (60, partial(train_alone, "2.5b", 8, 1, 0.0)),
    **{name: (60, partial(kernels.measure_kernel, name, KernelShape())) for name in kernels.KERNELS[1:]},
    "layout": (45, partial(kernels.measure_layouts, KernelShape(), torch.bfloat16)),
    "nanogpt-2.5b": (150, partial(compare_peers, "2.5b", 8)),
    **{f"2.5b-{b}x8": (90, partial(train_alone, "2.5b", b, 8)) for b in (16, 24)},
}
"""Every item, in the order of its worth."""


def full_size(name: str, batch: int, iterations: int = ITERATIONS, warm_up: int = WARM_UP) -> TrainingSize:
    """Return the model's published recipe at full size in bf16; the timed iterations come after the warm-up."""
    return size_of(read_run_config(model_file(name)).model, batch, "bf16", warm_up + iterations, warm_up)


def summarize(name: str, size: TrainingSize, measured: Measured, goal: float) -> Case:
    """Make a trained model's case from every contender's rounds."""
    speed = rates(size, measured)
    peak = PEAK_TFLOPS * 1e12 / flops_per_token(size.model, causal=True)
    return Case(
        name=name,
        series=[each for name, many in speed.items() for each in (
            series(name, "rate", "tokens/s", *many), series(name, "utilisation", "", *(rate / peak for rate in many)),
            series(name, "peak memory", "bytes", max(timed.peak_bytes for timed in measured[name])),
        )],
        ratios=[*(ratio(f"× {name}", speed[OURS], many, TO_PEERS) for name, many in speed.items() if name != OURS),
                ratio("utilisation", speed[OURS], [peak] * len(speed[OURS]), goal)],
        losses=first_losses(measured), setting=size.setting,
    )  # fmt: skip


def profile(name: str, size: TrainingSize) -> Case:
    """Return the milliseconds of the kernels that take the longest in an iteration, by torch's profiler."""
    step = OurLayout(OURS).build(size)
    for iteration in range(size.warm_up):
        step(iteration, DROPOUT)
    spent: dict[str, float] = defaultdict(float)
    with torch.profiler.profile() as trace:
        step(size.warm_up, DROPOUT)
    for event in trace.key_averages():
        if event.device_type.name == "CUDA":
            spent[event.key[:80]] += event.self_device_time_total / 1000
    longest = sorted(spent.items(), key=lambda item: -item[1])[:25]
    shown = [series(key, "time of an iteration", "ms", value) for key, value in longest]
    whole = series("all kernels", "time of an iteration", "ms", sum(spent.values()))
    return Case(name=f"kernels of an iteration, {name}", series=[whole, *shown])
