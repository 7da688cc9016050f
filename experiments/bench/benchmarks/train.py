"""Training on one processor core beside nanoGPT's model, stock and tuned, and beside what the core can do."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated

import typer

from engine.config import Precision
from engine.costs import flops_per_token
from engine.launch.allocator import keep_large_buffers
from experiments.bench.contender import SERIAL, Contender
from experiments.bench.ours import build_ours
from experiments.bench.peers import build_nanogpt
from experiments.bench.sizes import BenchSize, read_size
from experiments.bench.timing import (
    Measured,
    Rounds,
    differing_losses,
    finite,
    load_average,
    on_ranks,
    ratio,
    series,
    time_contender,
)
from experiments.bench.train_layouts import measure_layouts
from lineage.benchmark import Benchmark, Case
from lineage.errors import BadInput
from lineage.progress import Progress, announce

OURS, STOCK, TUNED = SERIAL, "stock nanoGPT", "tuned nanoGPT"
TOLERANCES: dict[Precision, float] = {"fp32": 1e-3, "bf16": 3e-2}
"""Most by which losses without dropout may differ; with dropout, where masks are each contender's own, MASKED."""
MASKED = 0.1
RATE = "tokens per processor second"
GEMM_WIDTH, GEMM_REPEATS, COPIED_BYTES = 1024, 4, 1 << 28


@dataclass(frozen=True)
class Row:
    """One case: a size, a number format, a dropout probability, and the goals set for it."""

    size: str
    precision: Precision
    dropout: float
    to_stock: float | None = None
    to_tuned: float | None = None
    to_limit: float | None = None
    memory_to_stock: float | None = None

    @property
    def name(self) -> str:
        """As it is printed."""
        return f"{self.size} {self.precision} dropout {self.dropout:g}"


ROWS = (
    Row("small", "bf16", 0.1, 2.0, 1.5, 0.60, 0.5),
    Row("small", "fp32", 0.1, 1.7, 1.2, 0.75),
    Row("small", "bf16", 0.0, to_limit=0.70),
    Row("small", "fp32", 0.0, to_limit=0.83),
    Row("tiny", "fp32", 0.0, to_limit=0.85),
    Row("tiny", "bf16", 0.0, to_limit=0.75),
    Row("twin", "fp32", 0.1, to_stock=1.5),
)


def contenders() -> list[Contender]:
    """In the order in which every round measures them."""
    return [
        Contender(OURS, 1, build_ours, is_ours=True),
        Contender(STOCK, 1, build_nanogpt, is_tuned=False),
        Contender(TUNED, 1, build_nanogpt),
    ]


def measure(
    rounds: Rounds = 3, case: Annotated[list[str] | None, typer.Option(help="Only this row; may be repeated.")] = None
) -> Benchmark:
    """Training on one core beside nanoGPT, stock and tuned, and beside the core's limit; then two processes to one.

    Takes about 15 minutes. Ends with code 3 if a contender's losses show that it computed something else.
    """
    cases = [each for each in ROWS if case is None or each.name in case]
    if unknown := set(case or ()) - {each.name for each in ROWS}:
        raise BadInput(f"no row is called {sorted(unknown)[0]!r}; there are: {', '.join(c.name for c in ROWS)}")
    import torch._dynamo  # noqa: F401  (imported here once, so that forked processes do not each import it)

    results, disagreements, load = [], [], []
    many = len(cases) * len(contenders())
    announce(f"{rounds} rounds of {many} contenders in processes of their own, then {rounds} rounds of our layouts")
    with Progress("train", len(cases) * rounds * len(contenders()), "measurements") as progress:
        for each in cases:
            size = read_size(each.size).in_precision(each.precision)
            by_contender: dict[str, list[Measured]] = {contender.name: [] for contender in contenders()}
            gflops = []
            for _ in range(rounds):
                gflops.append(on_ranks("matrix products", 1, gemm_gflops, each.precision)[0])
                for contender in contenders():
                    measured = on_ranks(contender.name, 1, measure_steps, contender, size, each.dropout)[0]
                    by_contender[contender.name].append(measured)
                    progress.advance(1, f"{each.name}: {contender.name}")
                load.append(load_average())
            results.append(summarize(each, size, by_contender, gflops))
            disagreements += differing(each, by_contender)
    layouts, differing_layouts = measure_layouts(rounds)
    largest = read_size(cases[0].size).in_precision(cases[0].precision)
    shares = on_ranks(OURS, 1, profile, largest, cases[0].dropout)[0]
    spent = Case(
        name=f"one iteration, {cases[0].name}",
        series=[series(name, "share of time", "", share) for name, share in shares.items()],
    )
    return Benchmark(
        benchmark="train",
        title="Training beside nanoGPT and the core's limit",
        cases=[*results, layouts, spent],
        disagreements=[*disagreements, *differing_layouts],
        notes=list(NOTES),
        setting={"rounds": rounds, "copying, GB/s": round(on_ranks("copy", 1, copy_rate)[0], 1)},
        load_average=load,
    )


def summarize(row: Row, size: BenchSize, measured: dict[str, list[Measured]], gflops: Sequence[float]) -> Case:
    """One case of the result, from every contender's rounds and what matrix products reached in each."""
    rates = {name: [size.tokens / median(sample.seconds) for sample in many] for name, many in measured.items()}
    limits = [rate * 1e9 / flops_per_token(size.model, causal=True) for rate in gflops]
    peaks = {name: [sample.peak_bytes for sample in many] for name, many in measured.items()}
    return Case(
        name=row.name,
        series=[
            *(series(name, "rate", RATE, *many) for name, many in rates.items()),
            series("limit", "rate", RATE, median(limits), kind="computed"),
            *(series(name, "peak memory", "bytes", *many) for name, many in peaks.items()),
            series("matrix products", "speed", "GFLOP/s", *gflops),
        ],
        ratios=[
            ratio("× stock nanoGPT", rates[OURS], rates[STOCK], row.to_stock),
            ratio("× tuned nanoGPT", rates[OURS], rates[TUNED], row.to_tuned),
            ratio("of the limit", rates[OURS], limits, row.to_limit),
            ratio("of stock nanoGPT's memory", peaks[OURS], peaks[STOCK], row.memory_to_stock, less_is_better=True),
        ],
        losses={name: finite(many[0].losses) for name, many in measured.items()},
        setting=size.describe(),
    )


def differing(row: Row, measured: dict[str, list[Measured]]) -> list[str]:
    """A sentence for each contender whose losses on the same data are not ours."""
    losses = {name: [sample.losses for sample in rounds] for name, rounds in measured.items()}
    return differing_losses(row.name, losses, MASKED if row.dropout else TOLERANCES[row.precision])


def measure_steps(contender: Contender, size: BenchSize, dropout: float) -> Measured:
    """On a process of its own: iterations and their processor seconds."""
    if contender.is_tuned:
        keep_large_buffers()
    import torch

    from engine.guard.memory import PeakMemory

    memory = PeakMemory(torch.device("cpu"))
    timed = time_contender(contender, size, [dropout], clock=time.process_time)[0]
    return Measured(timed.seconds, timed.losses, memory.bytes())


def gemm_gflops(precision: Precision) -> float:
    """Billions of operations per processor second in square products, the best of several tries."""
    import torch

    from engine.optim.precision import DTYPES

    a, b, out = (torch.ones(GEMM_WIDTH, GEMM_WIDTH, dtype=DTYPES[precision]) for _ in range(3))
    tries = []
    for _ in range(8):
        start = time.process_time()
        for _ in range(GEMM_REPEATS):
            torch.mm(a, b, out=out)
        tries.append(time.process_time() - start)
    return 2 * GEMM_WIDTH**3 * GEMM_REPEATS / min(tries) / 1e9


def copy_rate() -> float:
    """Gigabytes read and written per processor second in copying memory, the best of several tries."""
    import torch

    source, target = (torch.zeros(COPIED_BYTES, dtype=torch.uint8) for _ in range(2))
    tries = []
    for _ in range(5):
        start = time.process_time()
        target.copy_(source)
        tries.append(time.process_time() - start)
    return 2 * COPIED_BYTES / min(tries) / 1e9


def profile(size: BenchSize, dropout: float) -> dict[str, float]:
    """Share of an iteration of ours that each operation took, those of at least one percent."""
    keep_large_buffers()
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    step = build_ours(contenders()[0], size)
    step(0, dropout)
    with record(activities=[ProfilerActivity.CPU]) as recorded:
        step(1, dropout)
    times = {event.key: event.self_cpu_time_total for event in recorded.key_averages()}
    total = sum(times.values())
    largest = sorted(times.items(), key=lambda item: -item[1])
    return {name: round(spent / total, 4) for name, spent in largest if spent >= total / 100}


NOTES = (
    "tokens per processor second of one thread: forward, backward, clipping, AdamW; of each round the median of its "
    "timed iterations. Ratios are medians over rounds of the ratio within a round.",
    "stock nanoGPT: nanoGPT's model as published, glibc's own allocator settings, torch.optim.AdamW as nanoGPT makes "
    "it on CPU. tuned: this engine's allocator setting and the fused AdamW. In bf16 both run under autocast.",
    "The limit is what square matrix products of width 1024 reach in the same number format, by the operations of a "
    "token's products (attention halved for causality).",
)
