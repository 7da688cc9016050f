"""Times iterations and products on ranks; medians, spreads and ratios of what was timed."""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any, Literal

import typer

from experiments.bench.contender import Contender, Step
from experiments.bench.sizes import BenchSize
from lineage.benchmark import Ratio, Series
from lineage.errors import UserError

TIMEOUT_SECONDS = 600.0
GEMM_WIDTH = 1024
GEMM_REPEATS, GEMM_TRIES = 8, 4
Rounds = Annotated[int, typer.Option(min=1, help="How often every contender is measured, in turn.")]


@dataclass(frozen=True)
class Timed:
    """Iterations of one contender in one round at one dropout probability."""

    seconds: list[float]
    """Of every iteration that is not warm-up."""
    losses: list[float]
    """Of every iteration."""


@dataclass(frozen=True)
class Measured(Timed):
    """One contender in one round, in a process of its own."""

    peak_bytes: int


def time_contender(
    contender: Contender, size: BenchSize, dropouts: Sequence[float], clock: Callable[[], float] = time.perf_counter
) -> list[Timed]:
    """On a rank: the iterations of one round, for each dropout probability after the other."""
    import torch.distributed as dist

    step = contender.build(contender, size)
    barrier: Callable[[], object] = dist.barrier if contender.ranks > 1 else lambda: None
    per_dropout = size.train.iterations
    return [
        _time_step(step, range(number * per_dropout, (number + 1) * per_dropout), size.warm_up, dropout, barrier, clock)
        for number, dropout in enumerate(dropouts)
    ]


def _time_step(
    step: Step,
    iterations: range,
    warm_up: int,
    dropout: float,
    barrier: Callable[[], object],
    clock: Callable[[], float],
) -> Timed:
    seconds, losses = [], []
    for iteration in iterations:
        barrier()
        start = clock()
        losses.append(step(iteration, dropout))
        barrier()
        seconds.append(clock() - start)
    return Timed(seconds[warm_up:], losses)


def gemm_gflops(ranks: int) -> float:
    """On each of `ranks` ranks at once: billions of floating-point operations a second that all of them together
    reach in fp32 matrix products, the best of several tries.
    """
    import torch
    import torch.distributed as dist

    a, b, out = (torch.ones(GEMM_WIDTH, GEMM_WIDTH) for _ in range(3))
    tries = []
    for _ in range(GEMM_TRIES):
        if ranks > 1:
            dist.barrier()
        start = time.perf_counter()
        for _ in range(GEMM_REPEATS):
            torch.mm(a, b, out=out)
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        if ranks > 1:
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
        tries.append(seconds.item())
    return 2 * GEMM_WIDTH**3 * GEMM_REPEATS * ranks / min(tries) / 1e9


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


def finite(losses: Sequence[float]) -> list[float | None]:
    """The losses with none for what is not a number."""
    return [loss if math.isfinite(loss) else None for loss in losses]


def differing_losses(case: str, losses: Mapping[str, Sequence[Sequence[float]]], allowed: float) -> list[str]:
    """A sentence for each contender whose losses in some round are not those of the first contender's first round."""
    first = next(iter(losses))
    sentences = []
    for name, rounds in losses.items():
        gaps = [abs(a - b) for each in rounds for a, b in zip(each, losses[first][0], strict=True)]
        if not all(gap <= allowed for gap in gaps):
            sentences.append(f"{case}: losses of {name} differ from those of {first} by up to {max(gaps):.4g}")
    return sentences


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
