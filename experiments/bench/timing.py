"""Times iterations and products on ranks; medians, spreads and ratios of what was timed."""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, TypeVar

import typer

from engine.config import Precision
from engine.launch.allocator import keep_large_buffers
from experiments.bench.contender import BenchSize, Contender
from lineage.benchmark import Ratio, Series
from lineage.config import read_toml
from lineage.errors import UserError
from lineage.progress import Progress

NOTES: dict[str, list[str]] = read_toml(Path(__file__).with_name("notes.toml"))
"""How each benchmark measures, by its name."""
TIMEOUT_SECONDS = 600.0
GEMM_WIDTH = 1024
GEMM_REPEATS, GEMM_TRIES = 8, 4
K = TypeVar("K")
T = TypeVar("T")
Rounds = Annotated[int, typer.Option(min=1, help="How often every contender is measured, in turn.")]


@dataclass(frozen=True)
class Timed:
    """Iterations of one contender in one round, in processes of its own."""

    seconds: list[float]
    """Of every iteration that is not warm-up."""
    losses: list[float]
    """Of every iteration."""
    peak_bytes: int = 0
    """Of memory, on the first rank."""


Measured = Mapping[str, Sequence[Timed]]
"""What was timed of each contender: one for each round."""


def in_turn(
    name: str, rounds: int, measurements: Mapping[K, Callable[[], Any]]
) -> tuple[dict[K, list[Any]], list[float]]:
    """What each measurement gave in each round, and the machine's load average after each round.

    A round makes all of them, one after the other: what else the machine does falls on each alike.
    """
    taken: dict[K, list[Any]] = {key: [] for key in measurements}
    load = []
    with Progress(name, rounds * len(measurements), "measurements") as progress:
        for _ in range(rounds):
            for key, measure in measurements.items():
                taken[key].append(measure())
                progress.advance(1, ", ".join(map(str, key)) if isinstance(key, tuple) else str(key))
            load.append(load_average())
    return taken, load


def measure_contender(contender: Contender, size: BenchSize, *how: Any) -> Timed:
    """What `time_contender` gives on the first of new ranks."""
    return on_ranks(contender.name, contender.ranks, time_contender, contender, size, *how)[0]


def time_contender(
    contender: Contender, size: BenchSize, dropout: float = 0.0, clock: Callable[[], float] = time.perf_counter
) -> Timed:
    """On a rank: the iterations of one round."""
    if contender.is_tuned:
        keep_large_buffers()
    import torch.distributed as dist

    from engine.guard.memory import PeakMemory
    from engine.launch.mesh import local_device

    memory = PeakMemory(local_device())
    step = contender.build(contender, size)
    barrier: Callable[[], object] = dist.barrier if contender.ranks > 1 else lambda: None
    seconds, losses = [], []
    for iteration in range(size.train.iterations):
        barrier()
        start = clock()
        losses.append(step(iteration, dropout))
        barrier()
        seconds.append(clock() - start)
    return Timed(seconds[size.warm_up :], losses, memory.bytes())


def cpu_seconds(function: Callable[..., T], *arguments: Any) -> tuple[float, T]:
    """Processor seconds of this process that a call takes, and its answer."""
    start = time.process_time()
    answer = function(*arguments)
    return time.process_time() - start, answer


def device_seconds(
    run: Callable[[], object], repeats: int = 1, before: Callable[[], object] | None = None
) -> float:  # fmt: skip
    """Seconds that so many runs take: by a GPU's own clock, elsewhere of the processor.

    What a GPU computes `before` is not counted; the runs are asked for meanwhile.
    """
    import torch

    from engine.launch.mesh import local_device

    if local_device().type == "cpu":
        start = time.process_time()
        for _ in range(repeats):
            run()
        return time.process_time() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if before:
        before()
    first.record()
    for _ in range(repeats):
        run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def gemm_gflops(ranks: int = 1, precision: Precision = "fp32", clock: Callable[[], float] = time.perf_counter) -> float:
    """On each of `ranks` ranks at once: billions of floating-point operations a second that all of them together
    reach in matrix products, the best of several tries.
    """
    import torch
    import torch.distributed as dist

    from engine.optim.precision import DTYPES

    a, b, out = (torch.ones(GEMM_WIDTH, GEMM_WIDTH, dtype=DTYPES[precision]) for _ in range(3))
    tries = []
    for _ in range(GEMM_TRIES):
        if ranks > 1:
            dist.barrier()
        start = clock()
        for _ in range(GEMM_REPEATS):
            torch.mm(a, b, out=out)
        seconds = torch.tensor(clock() - start, dtype=torch.float64)
        if ranks > 1:
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
        tries.append(seconds.item())
    return 2 * GEMM_WIDTH**3 * GEMM_REPEATS * ranks / min(tries) / 1e9


def shaped_gflops(size: BenchSize, clock: Callable[[], float] = time.perf_counter) -> float:
    """Billions of operations a second in the products of a model's own weights, forward and backward: each the best of
    several tries.
    """
    import torch

    from engine.linear import linear
    from engine.optim.precision import DTYPES

    h, tokens = size.model.hidden_size, size.train.microbatch_size * size.model.seq_length
    widths = {(h, 3 * h): size.model.num_layers, (h, h): size.model.num_layers, (h, 4 * h): size.model.num_layers,
              (4 * h, h): size.model.num_layers, (h, size.model.padded_vocab_size): 1}  # fmt: skip
    seconds = operations = 0.0
    for (ins, outs), times in widths.items():
        x, weight, gradient = (
            torch.ones(shape, dtype=DTYPES[size.train.precision])
            for shape in ((tokens, ins), (outs, ins), (tokens, outs))
        )
        for product in (partial(linear, x, weight), partial(linear, gradient, weight.t()),
                        partial(torch.mm, gradient.t(), x)):  # fmt: skip
            tries = []
            for _ in range(GEMM_TRIES + 1):
                start = clock()
                for _ in range(GEMM_REPEATS):
                    product()
                tries.append((clock() - start) / GEMM_REPEATS)
            seconds += times * min(tries)
            operations += times * 2 * tokens * ins * outs
    return operations / seconds / 1e9


def rates(size: BenchSize, measured: Measured) -> dict[str, list[float]]:
    """Tokens a second of each contender in each round, by its median iteration."""
    return {name: [size.tokens / median(timed.seconds) for timed in many] for name, many in measured.items()}


def first_losses(measured: Measured) -> dict[str, list[float | None]]:
    """Each contender's of its first round, with none for what is not a number."""
    return {name: [loss if math.isfinite(loss) else None for loss in many[0].losses] for name, many in measured.items()}


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median over rounds of the ratio within a round."""
    return median(a / b for a, b in zip(numerators, denominators, strict=True))


def ratio(
    name: str,
    numerators: Sequence[float],
    denominators: Sequence[float],
    goal: float | None = None,
    less_is_better: bool = False,
) -> Ratio:
    """The ratio within each round, what slows a whole round cancels; its median is its value."""
    rounds = [a / b for a, b in zip(numerators, denominators, strict=True)]
    return Ratio(name=name, value=rounded(median(rounds)), rounds=[*map(rounded, rounds)], goal=goal,
                 less_is_better=less_is_better)  # fmt: skip


def series(
    contender: str, measure: str, unit: str, *samples: float, kind: Literal["measured", "computed"] = "measured"
) -> Series:
    """What a contender reached, a sample for each round."""
    return Series(contender=contender, measure=measure, unit=unit, samples=[*map(rounded, samples)], kind=kind)


def rounded(value: float) -> float:
    """Six significant digits; whole numbers in full."""
    return value if isinstance(value, int) else float(f"{value:.6g}")


def differing_losses(case: str, measured: Measured, allowed: float) -> list[str]:
    """A sentence for each contender whose losses in some round are not those of the first contender's first round."""
    first = next(iter(measured))
    sentences = []
    for name, rounds in measured.items():
        gaps = [abs(a - b) for each in rounds for a, b in zip(each.losses, measured[first][0].losses, strict=True)]
        if not all(gap <= allowed for gap in gaps):
            sentences.append(f"{case}: losses of {name} differ from those of {first} by up to {max(gaps):.4g}")
    return sentences


def failure(error: BaseException) -> str:
    """What an error is and the first line of what it says."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def load_average() -> float:
    """The machine's, over the last minute."""
    return round(os.getloadavg()[0], 2)


def on_ranks(name: str, ranks: int, function: Any, *arguments: Any) -> list[Any]:
    """What a function returns on each of new processes. Raises UserError naming what was measured when one fails."""
    from engine.launch.forked import RanksFailed, run_forked

    try:
        return run_forked(function, ranks, *arguments, timeout_seconds=TIMEOUT_SECONDS)
    except RanksFailed as error:
        raise UserError(f"{name}: {error.sentence}") from error
