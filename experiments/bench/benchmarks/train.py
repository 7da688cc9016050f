"""Training on one processor core beside nanoGPT's model, stock and tuned, and beside what the core can do."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Annotated, Any

import typer

from engine.config import ModelConfig, Precision
from engine.costs import flops_per_token
from engine.launch.allocator import keep_large_buffers
from engine.parallel.layout import split_layers
from experiments.bench import timing
from experiments.bench.benchmarks import parallel
from experiments.bench.contender import TOLERANCE, BenchSize, Contender, read_size
from experiments.bench.timing import NOTES, Measured, Rounds, ratio, series
from lineage.benchmark import Benchmark, Case
from lineage.errors import BadInput
from lineage.progress import announce

OURS, STOCK, TUNED = parallel.SERIAL, "stock nanoGPT", "tuned nanoGPT"
SEPARATE = "two separate processes"
"""Each trains a model of its own: no layout can gain more than that on this machine."""
LIMIT, SHAPED = "limit", "limit of its own shapes"
LAYOUTS = "two processes, tiny fp32"
TOLERANCES: dict[Precision, float] = {"fp32": 1e-3, "bf16": 3e-2}
"""Most by which losses without dropout may differ; with dropout, where masks are each contender's own, MASKED."""
MASKED = 0.1
RATE = "tokens per processor second"
COPIED_BYTES = 1 << 28


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
    to_shaped: float | None = None

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
    Row("twin", "fp32", 0.1, to_stock=1.5, to_shaped=0.8),
)


def contenders() -> list[Contender]:
    """In the order in which every round measures them."""
    from experiments.bench.contenders.ours import build_ours
    from experiments.bench.contenders.peers import build_nanogpt

    return [
        Contender(OURS, 1, build_ours, is_ours=True),
        Contender(STOCK, 1, build_nanogpt, is_tuned=False),
        Contender(TUNED, 1, build_nanogpt),
    ]


def separate() -> Contender:
    """What two processes of this engine reach that share nothing."""
    from experiments.bench.contenders.ours import build_separate

    return Contender(SEPARATE, 2, build_separate, is_ours=True)


def measure(
    rounds: Rounds = 3, case: Annotated[list[str] | None, typer.Option(help="Only this row; may be repeated.")] = None
) -> Benchmark:
    """Training on one core beside nanoGPT, stock and tuned, and beside the core's limit; two processes beside one.

    Takes about half an hour a round. Ends with code 3 if a contender's losses show that it computed something else.
    """
    from experiments.bench.contenders.kernels import copied_bytes_per_second

    cases = [each for each in ROWS if case is None or each.name in case]
    if unknown := set(case or ()) - {each.name for each in ROWS}:
        raise BadInput(f"no row is called {sorted(unknown)[0]!r}; there are: {', '.join(c.name for c in ROWS)}")
    announce(f"{rounds} rounds of {len(cases) * len(contenders())} contenders in processes of their own")
    shapes = {each.name: read_size(each.size).in_precision(each.precision) for each in cases}
    measurements: dict[tuple[str, str], Callable[[], Any]] = {}
    for each in cases:
        measurements[each.name, LIMIT] = partial(
            timing.on_ranks, "matrix products", 1, timing.gemm_gflops, 1, each.precision, time.process_time
        )
        measurements[each.name, SHAPED] = partial(
            timing.on_ranks, "products of its shapes", 1, timing.shaped_gflops, shapes[each.name], time.process_time
        )
        for contender in contenders():
            measurements[each.name, contender.name] = partial(
                timing.measure_contender, contender, shapes[each.name], each.dropout, time.process_time
            )
    tiny, layouts = read_size("tiny"), [each for each in parallel.contenders() if each.is_ours] + [separate()]
    measurements |= {(LAYOUTS, each.name): partial(timing.measure_contender, each, tiny) for each in layouts}
    taken, load = timing.in_turn("train", rounds, measurements)
    results, disagreements = [], []
    for each in cases:
        measured = {contender.name: taken[each.name, contender.name] for contender in contenders()}
        square, shaped = ([rate for (rate,) in taken[each.name, limit]] for limit in (LIMIT, SHAPED))
        results.append(summarize(each, shapes[each.name], measured, square, shaped))
        disagreements += differing(each, measured)
    of_layouts = {each.name: taken[LAYOUTS, each.name] for each in layouts}
    copied = timing.on_ranks("copy", 1, copied_bytes_per_second, COPIED_BYTES)[0]
    spent = [
        Case(
            name=f"one iteration, {each.name}",
            series=[
                series(name, "share of time", "", share)
                for name, share in timing.on_ranks(OURS, 1, profile, shapes[each.name], each.dropout)[0].items()
            ],
        )
        for each in cases
    ]
    return Benchmark(
        benchmark="train",
        title="Training beside nanoGPT and the core's limit",
        cases=[*results, summarize_layouts(tiny, of_layouts), *spent],
        disagreements=[*disagreements, *timing.differing_losses(LAYOUTS, of_layouts, TOLERANCE)],
        notes=NOTES["train"],
        setting={"rounds": rounds, "copying, GB/s": round(copied / 1e9, 1)},
        load_average=load,
    )


def summarize(row: Row, size: BenchSize, measured: Measured, square: Sequence[float], shaped: Sequence[float]) -> Case:
    """One case of the result, from every contender's rounds and what matrix products reached in each, square ones and
    those of the model's own shapes.
    """
    speed, operations = timing.rates(size, measured), flops_per_token(size.model, causal=True)
    limits, own = ([rate * 1e9 / operations for rate in gflops] for gflops in (square, shaped))
    peaks = {name: [timed.peak_bytes for timed in many] for name, many in measured.items()}
    return Case(
        name=row.name,
        series=[
            *(series(name, "rate", RATE, *many) for name, many in speed.items()),
            series(LIMIT, "rate", RATE, median(limits), kind="computed"),
            series(SHAPED, "rate", RATE, median(own), kind="computed"),
            *(series(name, "peak memory", "bytes", *many) for name, many in peaks.items()),
            series("matrix products", "speed", "GFLOP/s", *square),
            series("products of its shapes", "speed", "GFLOP/s", *shaped),
        ],
        ratios=[
            ratio("× stock nanoGPT", speed[OURS], speed[STOCK], row.to_stock),
            ratio("× tuned nanoGPT", speed[OURS], speed[TUNED], row.to_tuned),
            ratio("of the limit", speed[OURS], limits, row.to_limit),
            ratio("of its shapes' limit", speed[OURS], own, row.to_shaped),
            ratio("of stock nanoGPT's memory", peaks[OURS], peaks[STOCK], row.memory_to_stock, less_is_better=True),
        ],
        losses=timing.first_losses(measured),
        setting=size.describe(),
    )


def summarize_layouts(size: BenchSize, measured: Measured) -> Case:
    """Two processes of this engine against one of its own: tokens per second of wall clock."""
    speed, ideal = timing.rates(size, measured), pipeline_ideal(size.model, 2)
    speed[SEPARATE] = [2 * rate for rate in speed[SEPARATE]]
    return Case(
        name=LAYOUTS,
        series=[series(name, "rate", "tokens/s", *many) for name, many in speed.items()],
        ratios=[
            ratio("tp2, × one process", speed["tp2"], speed[OURS], 1.85),
            ratio("dp2, × one process", speed["dp2"], speed[OURS], 1.75),
            ratio("pp2, of the ideal", speed["pp2"], [ideal * rate for rate in speed[OURS]], 0.90),
            ratio(f"{SEPARATE}, × one process", speed[SEPARATE], speed[OURS]),
        ],
        setting={"pp2_ideal": round(ideal, 4)},
    )


def pipeline_ideal(model: ModelConfig, stages: int) -> float:
    """How many times faster than one process a pipeline can be: all operations by those of its largest stage."""
    layer = 12 * model.hidden_size**2 + model.seq_length * model.hidden_size
    head = model.vocab_size * model.hidden_size
    each = [len(one.layers) * layer + head * one.is_last for one in split_layers(model.num_layers, stages, 1)]
    return sum(each) / max(each)


def differing(row: Row, measured: Measured) -> list[str]:
    """A sentence for each contender whose losses on the same data are not ours."""
    return timing.differing_losses(row.name, measured, MASKED if row.dropout else TOLERANCES[row.precision])


def profile(size: BenchSize, dropout: float) -> dict[str, float]:
    """Share of an iteration of ours that each operation took, those of at least one percent."""
    keep_large_buffers()
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    ours = contenders()[0]
    step = ours.build(ours, size)
    step(0, dropout)
    with record(activities=[ProfilerActivity.CPU]) as recorded:
        step(1, dropout)
    times = {event.key: event.self_cpu_time_total for event in recorded.key_averages()}
    total = sum(times.values())
    largest = sorted(times.items(), key=lambda item: -item[1])
    return {name: round(spent / total, 4) for name, spent in largest if spent >= total / 100}
