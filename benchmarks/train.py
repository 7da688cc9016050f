"""Training on one core beside nanoGPT and the core's limit, on two beside one; CPU kernels beside
references."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.contenders import (
    Contender,
    OurLayout,
    Peer,
    TrainingSize,
    apart,
    in_turn,
    time_contender,
)
from benchmarks.kernels import KernelShape, kernel_cases, time_kernel, times_case
from benchmarks.timing import (
    Measured,
    cpu_seconds,
    differing_losses,
    first_losses,
    rates,
    ratio,
    series,
)
from mlm_repro.engine.config import ModelConfig, ParallelConfig, Precision, TrainConfig
from mlm_repro.engine.costs import flops_per_token
from mlm_repro.engine.kernels.registry import KERNELS
from mlm_repro.engine.optim.precision import DTYPES
from mlm_repro.engine.parallel.layout import split_layers
from mlm_repro.engine.run.resolved import read_run_config
from mlm_repro.experiments.benchmark import Benchmark, Case
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.progress import announce
from mlm_repro.lineage.shipped import model_file

OURS = "serial"
STOCK = "stock nanoGPT"
TUNED = "tuned nanoGPT"
LIMIT = "limit"
SEPARATE = "two separate processes"
LAYOUT_CASE = "two processes, tiny fp32"
KERNEL_CASES = "kernels"
TOLERANCES: dict[Precision, float] = {"fp32": 1e-3, "bf16": 3e-2}
"""The largest allowed difference of losses without dropout, by number format."""
MASKED = 0.1
"""The largest allowed difference with dropout, whose masks are each contender's own."""
RATE = "tokens per processor second"
GEMM_WIDTH = 1024
GEMM_REPEATS = 8
GEMM_TRIES = 4
KERNEL_SHAPE = KernelShape(s=1024, b=1, n=12, d=64, v=50304)
NOTES = [
    (
        "Rates are tokens per processor second of one thread: forward, backward, clipping, AdamW;"
        " of each round the median of its timed iterations. Ratios are medians over rounds of the"
        " ratio within a round."
    ),
    (
        "stock nanoGPT: nanoGPT's model as published, glibc's own allocator settings,"
        " torch.optim.AdamW as nanoGPT makes it on CPU. tuned: this engine's allocator setting and"
        " the fused AdamW. In bf16 both run under autocast."
    ),
    (
        "The limit is the rate of square matrix products of width 1024 in the same number format,"
        " by the operations of a token's products (attention halved for causality)."
    ),
    (
        "Two processes are timed by the clock, beside one. Two separate processes train a model"
        " each at the same time: no layout can gain more on this machine, whose cores may share a"
        " cache and memory. A pipeline's ideal is all operations over those of its largest stage."
    ),
    (
        "Kernels run forward and backward at the shapes of GPT-2 124M, beside their references in"
        " torch."
    ),
]


@dataclass(frozen=True)
class Row:
    """A case of the training benchmark: a size by name, a number format, a dropout probability, and
    goals, None for none: the least wanted of our speed as a multiple of stock and of tuned
    nanoGPT's and as a share of the processor's limit, and the most wanted of our memory as a share
    of stock nanoGPT's."""

    size: str
    precision: Precision
    dropout: float
    to_stock: float | None = None
    to_tuned: float | None = None
    to_limit: float | None = None
    memory_to_stock: float | None = None

    @property
    def name(self) -> str:
        """The case's name, one text of size, number format and dropout, such as `small bf16 dropout
        0.1`."""
        return f"{self.size} {self.precision} dropout {self.dropout:g}"


ROWS = (
    Row("small", "bf16", 0.1, 2.0, 1.5, 0.60, 0.5),
    Row("small", "fp32", 0.1, 1.7, 1.2, 0.75, 0.55),
    Row("small", "bf16", 0.0, to_limit=0.70),
    Row("small", "fp32", 0.0, to_limit=0.83, memory_to_stock=0.85),
    Row("tiny", "fp32", 0.0, to_limit=0.85),
    Row("tiny", "bf16", 0.0, to_limit=0.75),
    Row("twin", "fp32", 0.1, to_stock=1.5),
)
ALONE: tuple[Contender, ...] = (OurLayout(OURS), Peer(STOCK, is_tuned=False), Peer(TUNED))
"""Contenders on one core, in the order in which every round measures them."""
TOGETHER = (
    OurLayout(OURS),
    OurLayout("tp2", ranks=2, parallel=ParallelConfig(tp=2)),
    OurLayout("pp2", microbatches=2, ranks=2, parallel=ParallelConfig(pp=2)),
    OurLayout("dp2", ranks=2),
    OurLayout(SEPARATE, ranks=2, is_separate=True),
)
"""Contenders of the case of two processes, in the order in which every round measures them."""


def read_size(name: str, precision: Precision = "fp32") -> TrainingSize:
    """Return the TrainingSize called `name`, in the number format `precision`: the model's
    configuration and the recipe of a timed training, with the batch and the numbers of iterations.
    The names are `tiny`, `small` (GPT-2 124M) and `twin`, the twin of the 8.3b recipe. Raises
    KeyError for another name."""
    if name == "twin":
        twin = read_run_config(model_file("8.3b"), twin=True)
        return size_of(twin.model, twin.train.global_batch_size, precision, iterations=5, warm_up=2)
    layers, h, heads, s, batch, timing = {
        "tiny": (4, 256, 4, 256, 4, (7, 4)),
        "small": (12, 768, 12, 1024, 1, (3, 2)),
    }[name]
    model = ModelConfig(
        num_layers=layers,
        hidden_size=h,
        num_heads=heads,
        seq_length=s,
        vocab_size=50304,
        padded_vocab_size=50304,
    )
    return size_of(model, batch, precision, *timing)


def size_of(
    model: ModelConfig, batch: int, precision: Precision, iterations: int, warm_up: int
) -> TrainingSize:
    """Return the TrainingSize of `model`, trained in the number format `precision` with one
    microbatch of `batch` sequences an iteration. `iterations` includes the first `warm_up` ones,
    which are not timed.

    The vocabulary is enlarged to its padded size, so that every row is a real word and no contender
    masks padding. During the warm-up the heap grows until it holds the needs of an iteration.
    """
    train = TrainConfig(
        iterations=iterations,
        global_batch_size=batch,
        microbatch_size=batch,
        learning_rate=1e-3,
        warmup_iterations=0,
        precision=precision,
    )
    return TrainingSize(
        model.model_copy(update={"vocab_size": model.padded_vocab_size}), train, warm_up
    )


def gemm_gflops(precision: Precision) -> float:
    """Time products of square matrices of width 1024 in the number format `precision` on the CPU;
    return the billions of operations, of which a multiplication with its addition is two, per
    processor second, a float, in the best of several tries."""
    a, b, out = (torch.ones(GEMM_WIDTH, GEMM_WIDTH, dtype=DTYPES[precision]) for _ in range(3))

    def multiply() -> None:
        for _ in range(GEMM_REPEATS):
            torch.mm(a, b, out=out)

    best = min(cpu_seconds(multiply)[0] for _ in range(GEMM_TRIES))
    return 2 * GEMM_WIDTH**3 * GEMM_REPEATS / best / 1e9


def measure(rounds: int, names: Sequence[str] | None = None) -> Benchmark:
    """Measure the cases in `names`, trainings by name, `two processes, tiny fp32` or `kernels`, by
    default all, `rounds` times and in processes of their own; return the Benchmark, the record. Its
    `disagreements` name contenders whose losses in any round differ by more than is allowed from
    ours in the first; nothing is raised for them. Raises BadInput for an unknown name, UserError if
    a measurement fails."""
    every = [*(row.name for row in ROWS), LAYOUT_CASE, KERNEL_CASES]
    if unknown := set(names or ()) - {*every}:
        raise BadInput(f"no case is called {sorted(unknown)[0]!r}; there are: {', '.join(every)}")
    chosen = set(names or every)
    rows = [row for row in ROWS if row.name in chosen]
    announce(
        f"{rounds} rounds of {len(rows)} trainings beside {len(ALONE) - 1} others, in processes of"
        " their own"
    )
    sizes = {row.name: read_size(row.size, row.precision) for row in rows}
    measurements: dict[tuple[str, str], Callable[[], Any]] = {}
    for row in rows:
        measurements[row.name, LIMIT] = partial(
            apart, "matrix products", gemm_gflops, row.precision
        )
        for contender in ALONE:
            how = contender, sizes[row.name], row.dropout, time.process_time
            measurements[row.name, contender.name] = partial(
                apart, contender.name, time_contender, *how
            )
    tiny = read_size("tiny")
    for layout in TOGETHER if LAYOUT_CASE in chosen else ():
        measurements[LAYOUT_CASE, layout.name] = partial(
            apart, layout.name, time_contender, layout, tiny, ranks=layout.ranks
        )
    taken = in_turn("train", rounds, measurements)
    cases = []
    disagreements = []
    for row in rows:
        measured = {contender.name: taken[row.name, contender.name] for contender in ALONE}
        cases.append(summarize(row, sizes[row.name], measured, taken[row.name, LIMIT]))
        allowed = MASKED if row.dropout else TOLERANCES[row.precision]
        disagreements += differing_losses(row.name, measured, allowed)
    if LAYOUT_CASE in chosen:
        together = {layout.name: taken[LAYOUT_CASE, layout.name] for layout in TOGETHER}
        cases.append(summarize_layouts(tiny, together))
        disagreements += differing_losses(LAYOUT_CASE, together, TOLERANCES["fp32"])
    if KERNEL_CASES in chosen:
        for precision in TOLERANCES:
            cases += apart("kernels", measure_kernels, precision, rounds, KERNEL_SHAPE)
    return Benchmark(
        benchmark="train",
        title="Training beside nanoGPT and the core's limit",
        cases=cases,
        disagreements=disagreements,
        notes=NOTES,
        setting={"rounds": rounds},
    )


def summarize(row: Row, size: TrainingSize, measured: Measured, gflops: Sequence[float]) -> Case:
    """Return the Case of `row` from `measured`, the rounds of each contender by its name, all
    trained at `size`, and `gflops`, the speed of matrix products in each round, in GFLOP/s. Each
    contender has a series of its rates in tokens per processor second and one of its peak memory in
    bytes, and `gflops` is a series too, each with a number for each round. One more series has a
    single number, the limit: the rate at which training would do the operations of its own
    products, without the masked half of attention, at the median of `gflops`.

    Its ratios, round by round, with the row's goals, are our rate to stock and tuned nanoGPT's and
    to the limit at that round's `gflops`, and our memory to stock nanoGPT's. Its losses are the
    first round's.
    """
    speed = rates(size, measured)
    operations = flops_per_token(size.model, causal=True)
    limits = [rate * 1e9 / operations for rate in gflops]
    peaks = {name: [timed.peak_bytes for timed in many] for name, many in measured.items()}
    return Case(
        name=row.name,
        series=[
            *(series(name, "rate", RATE, *many) for name, many in speed.items()),
            series(LIMIT, "rate", RATE, median(limits), kind="computed"),
            *(series(name, "peak memory", "bytes", *many) for name, many in peaks.items()),
            series("matrix products", "speed", "GFLOP/s", *gflops),
        ],
        ratios=[
            ratio("× stock nanoGPT", speed[OURS], speed[STOCK], row.to_stock),
            ratio("× tuned nanoGPT", speed[OURS], speed[TUNED], row.to_tuned),
            ratio("of the limit", speed[OURS], limits, row.to_limit),
            ratio(
                "of stock nanoGPT's memory",
                peaks[OURS],
                peaks[STOCK],
                row.memory_to_stock,
                less_is_better=True,
            ),
        ],
        losses=first_losses(measured),
        setting=size.setting,
    )


def summarize_layouts(size: TrainingSize, measured: Measured) -> Case:
    """Return the Case of two processes. `measured` has the rounds of each contender in `TOGETHER`
    by its name: one process alone; the layouts tp2, pp2 and dp2 on two processes; and one of two
    processes that train separately at the same time; `size` is the training that was timed. The
    Case has rates in tokens per second of wall clock, doubled for the process that trains
    separately, their ratios to the rate of one process, with goals for the layouts, and the losses
    of the first round. The ratio of pp2 is to the rate of a pipeline without a bubble
    (`pipeline_ideal`)."""
    speed = rates(size, measured)
    speed[SEPARATE] = [2 * rate for rate in speed[SEPARATE]]
    single = speed[OURS]
    ideal = pipeline_ideal(size.model, 2)
    return Case(
        name=LAYOUT_CASE,
        series=[series(name, "rate", "tokens/s", *many) for name, many in speed.items()],
        ratios=[
            ratio("tp2, × one process", speed["tp2"], single, 1.85),
            ratio("dp2, × one process", speed["dp2"], single, 1.75),
            ratio("pp2, of the ideal", speed["pp2"], [ideal * rate for rate in single], 0.90),
            ratio(f"{SEPARATE}, × one process", speed[SEPARATE], single),
        ],
        losses=first_losses(measured),
        setting=size.setting | {"pp2_ideal": ideal},
    )


def pipeline_ideal(model: ModelConfig, stages: int) -> float:
    """Return how many times as fast as one process a pipeline of `stages` stages could be without
    a bubble: the operations of the whole model over those of its largest stage, a float."""
    h = model.hidden_size
    layer = 12 * h**2 + model.seq_length * h
    operations = [
        len(stage.layers) * layer + model.vocab_size * h * stage.is_last
        for stage in split_layers(model.num_layers, stages, 1)
    ]
    return sum(operations) / max(operations)


def measure_kernels(precision: Precision, rounds: int, shape: KernelShape) -> list[Case]:
    """Time each kernel that has a gradient and is compiled for CPUs, forward and backward together,
    on tensors of the sizes `shape` in the number format `precision`, in `rounds` rounds beside its
    reference and, with a C++ compiler, torch.compile. Return a list of a Case for each kernel, with
    the times of one forward and backward in milliseconds. Call it in a process that sees no GPU,
    such as one of `apart`."""
    dtype = DTYPES[precision]
    return [
        times_case(f"{name} {precision}", time_kernel(case, "cpu", rounds))
        for name, case in kernel_cases(shape, dtype).items()
        if "cpu" in KERNELS[name]
    ]
