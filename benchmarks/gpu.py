"""One GPU's training and kernels beside torch.compile, nanoGPT and the GPU's own limits, item by
item.

Each item has a time limit. One process measures all of them and builds a model once for the items
that follow each other. An item's result is written when the item ends, so that nothing is lost on a
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
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
from benchmarks.train import MASKED, size_of
from mlm_repro.data_pipeline.tokens.token_file import TokenFileWriter, token_dtype
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer, padded_vocab_size
from mlm_repro.engine.costs import flops_per_token
from mlm_repro.engine.launch.local import keep_large_buffers
from mlm_repro.engine.run.files import read_steps
from mlm_repro.engine.run.resolved import read_run_config
from mlm_repro.engine.step import TrainingStep
from mlm_repro.experiments.benchmark import Benchmark, Case, read_benchmark, write_benchmark
from mlm_repro.lineage.atomic import write_json
from mlm_repro.lineage.digest import seal
from mlm_repro.lineage.environment import describe_environment, list_gpus, source_state
from mlm_repro.lineage.errors import BadInput, HardwareMissing, Interrupted, UserError
from mlm_repro.lineage.processes import end_with_parent
from mlm_repro.lineage.shipped import model_file

MICROBATCHES = 8
EAGER = OurLayout(OURS, microbatches=MICROBATCHES)
CONTENDERS: tuple[Contender, ...] = (
    OurLayout(OURS, is_captured=True),
    Peer("nanoGPT, torch.compile", is_compiled=True),
)
TO_PEERS = 1.3
PEAK_TFLOPS = 989.0
"""Rate of dense bf16 products of an H100 or H200 SXM in TFLOP/s, published by NVIDIA (H200
datasheet). Every GPU's utilisation is stated as a share of it."""
DROPOUT = 0.1
COMPARED_LOSSES = 2
LEAST_SECONDS = 5.0
"""Time left before the deadline that an item needs to begin."""
COPIED = 1 << 30
"""Number of master weights, 4 GiB in fp32, that are copied to the host beside training."""
NOTES = [
    (
        "tokens/s are those of an iteration: forward, backward, clipping, AdamW, bf16, dropout 0.1"
        " unless the name says otherwise; the median of the timed iterations."
    ),
    (
        f"Utilisation is of {PEAK_TFLOPS:g} TFLOP/s (published), by the operations of a token's"
        " products, forward and backward, attention halved for causality; recomputed ones are not"
        " counted."
    ),
    (
        "Kernels are timed while the GPU has a queue of them. Losses are compared in the first two"
        " iterations."
    ),
    (
        "nanoGPT trains under autocast to bf16 with torch.compile and fused AdamW; masks of dropout"
        " are its own, so that later losses differ more."
    ),
]
GOALS = {"355m": 0.42, "2.5b": 0.50, "2.5b, without dropout": 0.58}
"""The least share of the GPU's peak that each training should reach, by the training's name."""
ITERATIONS = 6
WARM_UP = 3
TRIED = (
    "name=tried model.num_layers=4 model.hidden_size=128 model.num_heads=4 model.seq_length=128"
    " train.iterations=200 train.warmup_iterations=0 train.decay=cosine train.global_batch_size=8"
    " train.microbatch_size=8 train.precision=bf16 train.validation_interval=1000"
    " train.validation_samples=8 train.checkpoint_interval=1000"
)
"""Settings, with spaces between them, of the run with which `mlm-train` is tried."""
Result = Sequence[Case | str]


class Worker:
    """A spawned process, started at the first call of the method `answer`, which runs a function in
    it and returns the result, one function after another. If a function fails or takes longer than
    that call allows, `answer` raises UserError, the process is killed, and the next call starts a
    new one. The method `end` kills the process."""

    _process: SpawnProcess | None = None
    _pipe: Connection

    def answer(self, seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call `function` with the arguments in this worker's own process, which is started if
        there is none, wait for its result and return it. Raises UserError if the function fails,
        takes longer than `seconds`, the start of the process included, or ends the process; in each
        case the process is then killed. Function, arguments and result must be picklable."""
        if self._process is None:
            spawn = multiprocessing.get_context("spawn")
            self._pipe, child_end = spawn.Pipe()
            self._process = spawn.Process(target=_serve, args=(child_end,), daemon=True)
            self._process.start()
            child_end.close()
        try:
            self._pipe.send((function, arguments))
            late = f"the item took longer than {seconds:.0f} seconds", None
            why, value = self._pipe.recv() if self._pipe.poll(seconds) else late
        except (EOFError, BrokenPipeError):
            self._process.join()
            why = f"the process that measures ended with code {self._process.exitcode}"
            value = None
        if why:
            self.end()
            raise UserError(why)
        return value

    def end(self) -> None:
        """Kill this worker's process, if there is one, and wait for its end; the next call of
        `answer` starts a new one."""
        if self._process:
            self._process.kill()
            self._process.join()
            self._process = None


def _serve(pipe: Connection) -> None:
    while True:
        function, arguments = pipe.recv()
        try:
            pipe.send(("", function(*arguments)))
        except Exception as error:
            traceback.print_exc()
            pipe.send((failure(error), None))


class ItemRecord:
    """Record of the GPU benchmark's items. The method `attempt` measures an item and adds its cases
    to gpu.json in a folder, beside those that were there before; `say` prints a line on an item;
    `done` has the names of the measured items, also of those before; `result` is the whole as a
    Benchmark. The caller ends the process of `worker` after the last item."""

    def __init__(self, out: Path | None, deadline: float | None) -> None:
        """Continue the record gpu.json of the folder `out`, if there is one; the folder is made if
        it is missing. If `out` is None, nothing is written. `deadline` is in seconds from now, None
        or 0 for none. Raises BadInput if the folder cannot be made or gpu.json is not a record, and
        IntegrityFailure if gpu.json cannot be read."""
        self.out = out
        self.worker = Worker()
        self._ends = time.monotonic() + (deadline or float("inf"))
        self._cases: dict[str, Case] = {}
        self._disagreements: dict[str, None] = {}
        self.done: dict[str, str] = {}
        """Items of the record, each with the commit that it was measured at."""
        if out:
            try:
                out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise BadInput(
                    f"{out}, the folder of --out, cannot be made: {error.strerror}"
                ) from error
            if (out / "gpu.json").exists():
                before = read_benchmark(out / "gpu.json")
                self._cases = {case.name: case for case in before.cases}
                self._disagreements = dict.fromkeys(before.disagreements)
                self.done = dict(before.setting["done"])

    def attempt(self, name: str, seconds: float, measure: Callable[[], Result]) -> None:
        """Measure the item `name` by calling `measure` in the worker's process, for at most
        `seconds` and not beyond the deadline. `measure` returns a sequence of Cases and of texts,
        its disagreements. Add both to the record, write gpu.json if there is a folder, and print a
        line of JSON for each case, which is appended to the folder's gpu.jsonl too. If the item
        fails, takes too long or has too little time left, there is only such a line with the
        reason; nothing is raised."""
        limit = min(seconds, self._ends - time.monotonic())
        start = time.monotonic()
        try:
            if limit < LEAST_SECONDS:
                raise UserError(
                    "too little time is left before --deadline, so the item was not begun: give"
                    " --deadline more seconds"
                )
            results = self.worker.answer(limit, measure)
        except UserError as error:
            self.say(name, failed=str(error), seconds=round(time.monotonic() - start, 2))
            return
        self.done[name] = source_state().get("commit") or "unknown"
        for result in results:
            if isinstance(result, Case):
                self._cases[result.name] = result
                self.say(name, seconds=round(time.monotonic() - start, 2), case=result)
            else:
                self._disagreements[result] = None
        if self.out:
            write_benchmark(self.out / "gpu.json", self.result)

    def say(self, name: str, **values: Any) -> None:
        """Print a line of JSON, with the item's name and the values, to standard output, and append
        it to `gpu.jsonl` in the record's folder, if there is one."""
        line = to_json({"item": name} | values).decode()
        print(line, flush=True)
        if self.out:
            with (self.out / "gpu.jsonl").open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    @property
    def result(self) -> Benchmark:
        """The Benchmark of all items so far, with the ones that the folder's gpu.json had before:
        their cases and disagreements, the commit of each item, and the machine as it is now. Raises
        UserError if there is no case."""
        if not self._cases:
            raise UserError("nothing was measured: the line of each item above has the reason")
        return Benchmark(
            benchmark="gpu",
            title="One GPU beside torch.compile, nanoGPT and its own limits",
            cases=list(self._cases.values()),
            disagreements=list(self._disagreements),
            notes=NOTES,
            setting=gpu_facts() | {"done": self.done},
            environment=described_here(),
        )


def chosen_items(chosen: str) -> dict[str, float]:
    """Return a dict of the time limits in seconds of the chosen items by name, in the order of the
    table ITEMS. `chosen` is `all`, or names with commas between them. Raises BadInput for an
    unknown item."""
    names = list(ITEMS) if chosen == "all" else chosen.split(",")
    if unknown := [name for name in names if name not in ITEMS]:
        raise BadInput(f"no item is called {unknown[0]!r}; there are: {', '.join(ITEMS)}")
    return {name: seconds for name, (seconds, _) in ITEMS.items() if name in names}


def measure(chosen: str, out: Path | None, deadline: float | None) -> Benchmark:
    """Measure the chosen items of the GPU benchmark, `all` or names with commas between them, in
    the order of its table, and return the Benchmark, the whole record. The record is kept in
    gpu.json of the folder `out`, which is made and written after each item, and items that it has
    are skipped. A line of JSON is printed for each case, and for an item that fails, takes too long
    or has too little time left, which gets nothing else; the lines are appended to the folder's
    gpu.jsonl too. If `out` is None, nothing is written. At `deadline`, in seconds from now, the
    item in progress is stopped; in the last LEAST_SECONDS before it no item begins. None or 0 is
    for no deadline.

    Raises BadInput for an unknown item or an unfit folder, IntegrityFailure if gpu.json cannot be
    read, HardwareMissing without a GPU or a torch with CUDA, UserError if the record has no case.
    """
    names = chosen_items(chosen)
    record = ItemRecord(out, deadline)
    missing = ""
    if not list_gpus():
        missing = "there is no NVIDIA GPU here"
    elif torch.version.cuda is None:
        missing = f"torch {torch.__version__} is built without CUDA"
    for name in names:
        if missing:
            record.say(name, missing=missing)
        elif name not in record.done:
            record.attempt(name, *ITEMS[name])
    record.worker.end()
    if missing:
        raise HardwareMissing(
            f"{missing}: nothing was measured; run this where a torch with CUDA has an NVIDIA GPU"
        )
    return record.result


def versions() -> Result:
    """Return a list of one case without numbers, whose setting describes the GPU, the machine and
    its software."""
    return [Case(name="versions", setting=gpu_facts() | describe_environment().to_json())]


@lru_cache(1)
def built(name: str) -> TrainingStep:
    """Return the TrainingStep of the published model `name` at full size, with its optimizer, on
    the GPU. This process keeps the last one: another call with that name returns it as it was left,
    so its training goes on, and a call with another name builds anew. Changes this process's
    allocator."""
    keep_large_buffers()
    return EAGER.training(full_size(name, MICROBATCHES))


def train_alone(name: str, b: int, dropout: float = DROPOUT, is_captured: bool = False) -> Result:
    """Train the published model `name`, "355m" or "2.5b", at full size, with 8 microbatches of `b`
    sequences and the given probability of dropout, which may be 0 for "2.5b" alone, for one
    iteration that warms up and three timed ones. The model is that of `built`, which may have been
    trained already. Return a list of two cases: its speed, and what the GPU does in one more
    iteration. Raises UserError if `is_captured` is set and the passes got no CUDA graphs: CUDA
    could not capture the passes, or the graphs gave another loss or norm."""
    training = built(name)
    size = full_size(name, b * MICROBATCHES, 3, 1)
    training.model.graphs = None
    layout = replace(EAGER, is_captured=is_captured)
    timed = time_contender(layout, size, dropout, training=training)
    if is_captured and training.model.graphs is None:
        raise UserError(
            "the passes of the microbatches got no CUDA graphs, so no speed is kept: see the line"
            " with 'CUDA graphs are not used' on standard error for the reason"
        )
    kind = name + ("" if dropout else ", without dropout")
    title = f"{kind}, {b} × {MICROBATCHES}" + (", captured" if is_captured else "")
    step = layout.steps(training, size)
    return [
        summarize(title, size, {OURS: [timed]}, GOALS[kind]),
        timeline(title, partial(step, 1, dropout)),
    ]


def timeline(title: str, step: Callable[[], object]) -> Case:
    """Call `step` under torch's profiler. Return a Case, `title` in its name, of the milliseconds
    in which the GPU was busy or idle, the host waited, and the 25 kernels that took longest ran,
    with the number of launches."""
    with torch.profiler.profile() as trace:
        step()
    spent = defaultdict[str, float](float)
    spans = []
    waited = 0.0
    for event in trace.events():
        start = event.time_range.start
        end = event.time_range.end
        if event.device_type.name == "CUDA":
            spans.append((start, end))
            spent[event.name[:80]] += (end - start) / 1000
        elif "Synchronize" in event.name:
            waited += (end - start) / 1000
    busy, idle = busy_and_idle(spans)
    sums = {"busy": busy / 1000, "nothing running": idle / 1000, "host waits": waited}
    longest = dict(sorted(spent.items(), key=lambda item: -item[1])[:25])
    shown = [
        series(key, "time of an iteration", "ms", value) for key, value in (sums | longest).items()
    ]
    return Case(
        name=f"timeline, {title}", series=[*shown, series("launches", "number", "", len(spans))]
    )


def busy_and_idle(spans: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return two times in the unit of the spans (start, end): the time that they cover together,
    and the time between the first and the last that no span covers."""
    busy = idle = 0.0
    until = None
    for start, end in sorted(spans):
        covered = start if until is None else until
        idle += max(start - covered, 0.0)
        busy += max(end - max(start, covered), 0.0)
        until = max(covered, end)
    return busy, idle


def compare_peers(name: str, b: int) -> Result:
    """Train the published model `name`, "355m" or "2.5b", at full size with every contender, one
    after the other, in batches of `b` sequences. Return a list: the case of their speeds, and a
    sentence for each contender whose loss differs by more than 0.1 from that of the first, our
    engine, in one of the first two iterations. Drops the model that `built` keeps."""
    # The model that an earlier item built would leave less memory to the contenders.
    built.cache_clear()
    size = full_size(name, b)
    measured = {
        contender.name: [time_contender(contender, size, DROPOUT)] for contender in CONTENDERS
    }
    case = summarize(f"{name} beside peers", size, measured, GOALS[name])
    return [case, *differing_losses(name, measured, MASKED, COMPARED_LOSSES)]


def compare_copies(name: str, b: int) -> Result:
    """Time three iterations of the published model `name`, which the last call of `built` may have
    trained already: a first one, one alone, and one while up to 4 GiB of its master weights in fp32
    are copied to the host, as an asynchronous checkpoint copies them. Return a list of one case
    with the milliseconds of each, and the ratios of the last two to the first. `b` is the number of
    sequences in a microbatch. Needs a GPU."""
    training = built(name)
    source = training.optimizer.groups[0].master[:COPIED]
    step = EAGER.steps(training, full_size(name, b * MICROBATCHES))
    host = torch.empty(source.shape, pin_memory=source.is_cuda)
    stream = torch.cuda.Stream()
    seconds = {}
    for who in ("first", "training", "training and a copy"):
        start = time.perf_counter()
        if who == "training and a copy":
            with torch.cuda.stream(stream):
                host.copy_(source, non_blocking=True)
        step(0, DROPOUT)
        seconds[who] = [time.perf_counter() - start]
    return [kernels.times_case("a copy to the host", (seconds, {}))]


def try_program() -> Result:
    """Train a small model in bf16 with `mlm-train`, once on the CPU, and once on the GPU, where it
    is stopped by SIGTERM and resumed. Return a list: a Case with the losses of both trainings, and
    a sentence if they differ by more than 0.1 in an iteration. Raises UserError if a program ends
    with another code than expected, also if the training on the GPU was done before SIGTERM
    came."""
    losses: dict[str, list[Timed]] = {}
    with TemporaryDirectory() as folder:
        dataset = write_dataset(Path(folder) / "data")
        settings = [f"--set={setting}" for setting in (*TRIED.split(), f"data.dataset={dataset}")]
        program = [sys.executable, "-m", "mlm_repro.engine.cli", "run", "355m", "--ranks=1"]
        for device, variables in (("cpu", {"CUDA_VISIBLE_DEVICES": ""}), ("cuda", {})):
            runs = Path(folder) / device
            begin = partial(
                subprocess.Popen,
                [*program, *settings, f"--runs={runs}"],
                env=os.environ | variables,
                stdout=sys.stderr,
                preexec_fn=end_with_parent,
            )
            if device == "cuda":
                stopped = begin()
                while stopped.poll() is None and not any(map(read_steps, runs.glob("tried-*"))):
                    time.sleep(0.01)
                stopped.terminate()
                if stopped.wait() != Interrupted.exit_code:
                    raise UserError(
                        f"mlm-train ended with code {stopped.returncode} before SIGTERM or by it,"
                        " and not with that of an interrupted run; its output above may say why"
                    )
            if code := begin().wait():
                raise UserError(
                    f"the output of mlm-train above says why it ended with code {code} on {device}"
                )
            steps = read_steps(next(runs.glob("tried-*")))
            losses[device] = [Timed([1.0], [step.loss for step in steps])]
    case = Case(name="mlm-train, stopped and resumed, beside the CPU", losses=first_losses(losses))
    return [case, *differing_losses("mlm-train", losses, MASKED)]


def write_dataset(directory: Path) -> Path:
    """Write a tokenized, sealed dataset of random letters, split into train and valid, with its
    tokenizer, into a directory; return the directory."""
    texts = ["".join(random.Random(number).choices("abcdefgh ", k=200)) for number in range(600)]
    tokenizer = Tokenizer.train(texts, 290)
    tokenizer.save(directory / "tokenizer")
    for split, part in (("train", texts[:500]), ("valid", texts[500:])):
        with TokenFileWriter(directory / f"{split}_text_document", token_dtype(290)) as writer:
            for text in part:
                writer.add_document([*tokenizer.encode(text), tokenizer.end_of_text])
    made = {
        "name": "letters",
        "seed": 0,
        "tokenizer": {"kind": "train", "digest": tokenizer.digest},
        "vocab_size": tokenizer.vocab_size,
        "padded_vocab_size": padded_vocab_size(tokenizer.vocab_size),
    }
    write_json(directory / "dataset.json", made)
    seal(directory)
    return directory


def check_kernels(kind: torch.dtype, shape: KernelShape, *names: str) -> Result:
    """Compare the kernels in `names`, by default all, with their references on this GPU at a shape
    and in the number format `kind`, as the tests do under an interpreter. Return a list: for each
    kernel a Case, with its largest error as a multiple of the reference's error if this multiple is
    finite, and after the Case a sentence if the multiple is above 2 or not finite. Needs the tests'
    package."""
    from tests.engine import exactness

    return exactness.check_kernels(kind, shape, names)


SMALL = KernelShape(s=200, b=2, n=3, d=96, v=1000)
LONG = KernelShape(s=4096, b=2, n=1, d=64, v=51200)
"""The shape of a real head: n = 8,192 tokens and a vocabulary of 51,200."""
ITEMS: dict[str, tuple[float, Callable[[], Result]]] = {
    "versions": (15, versions),
    "2.5b": (50, partial(train_alone, "2.5b", 8)),
    "2.5b-dropout-0": (50, partial(train_alone, "2.5b", 8, 0.0)),
    "rates": (120, partial(kernels.measure_rates, KernelShape())),
    "2.5b-captured": (60, partial(train_alone, "2.5b", 8, DROPOUT, True)),
    "kernels": (80, partial(kernels.compare_kernels, KernelShape())),
    **{f"2.5b-{b}x8": (25, partial(train_alone, "2.5b", b)) for b in (16, 24)},
    "copies": (20, partial(compare_copies, "2.5b", 8)),
    "355m": (60, partial(compare_peers, "355m", 32)),
    "mlm-train": (60, try_program),
    "exact-bf16": (45, partial(check_kernels, torch.bfloat16, SMALL)),
    "exact-fp16": (45, partial(check_kernels, torch.float16, SMALL)),
    "exact-fp16-head": (45, partial(check_kernels, torch.float16, LONG, "linear_cross_entropy")),
    "exact-fp32": (45, partial(check_kernels, torch.float32, SMALL)),
}
"""Every item by name, its limit in seconds and its function, the least known first. Exactness comes
last, because an interpreter tests it without a GPU."""


def full_size(
    name: str, batch: int, iterations: int = ITERATIONS, warm_up: int = WARM_UP
) -> TrainingSize:
    """Return a TrainingSize: the published model `name` with `batch` sequences an iteration in
    bf16, `warm_up` iterations, and `iterations` timed ones after them. Raises BadInput for a name
    that is no shipped model's."""
    return size_of(
        read_run_config(model_file(name)).model, batch, "bf16", warm_up + iterations, warm_up
    )


def summarize(name: str, size: TrainingSize, measured: Measured, goal: float) -> Case:
    """Return the Case called `name` of a trained model from every contender's rounds, with this
    suite's under the name `ours`: tokens a second, share of the peak `PEAK_TFLOPS`, whatever the
    GPU is, greatest peak memory in bytes, losses of the first round, and the ratios of our speed to
    the others' and to the peak. The share counts the operations of matrix products without the
    masked half of attention. `size` is the model with its batch; `goal` is the least share of the
    peak that ours should reach."""
    speed = rates(size, measured)
    peak = PEAK_TFLOPS * 1e12 / flops_per_token(size.model, causal=True)
    return Case(
        name=name,
        series=[
            each
            for name, many in speed.items()
            for each in (
                series(name, "rate", "tokens/s", *many),
                series(name, "utilisation", "", *(rate / peak for rate in many)),
                series(
                    name, "peak memory", "bytes", max(timed.peak_bytes for timed in measured[name])
                ),
            )
        ],
        ratios=[
            *(
                ratio(f"× {name}", speed[OURS], many, TO_PEERS)
                for name, many in speed.items()
                if name != OURS
            ),
            ratio("utilisation", speed[OURS], [peak] * len(speed[OURS]), goal),
        ],
        losses=first_losses(measured),
        setting=size.setting,
    )
