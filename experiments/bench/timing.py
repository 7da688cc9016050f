"""Times iterations and products on ranks; medians, spreads and ratios of what was timed."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from experiments.bench.contenders import Contender, Step
from experiments.bench.sizes import BenchSize
from lineage.errors import UserError

TIMEOUT_SECONDS = 600.0
GEMM_WIDTH = 1024
GEMM_REPEATS, GEMM_TRIES = 8, 4
LESS_IS_BETTER = {"memory_to_stock"}


@dataclass(frozen=True)
class Timed:
    """Iterations of one contender in one round at one dropout probability."""

    seconds: list[float]
    """Of every iteration that is not warm-up."""
    losses: list[float]
    """Of every iteration."""


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


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """The ratio within each round: what slows a whole round cancels."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median over rounds of the ratio within a round."""
    return median(ratios(numerators, denominators))


def against_goals(
    case: str, each_round: Mapping[str, Sequence[float]], goals: Mapping[str, float | None]
) -> dict[str, Any]:
    """Ratios by name: of each round, their medians, the goals that were set, and which of these were reached.

    Of LESS_IS_BETTER the goal is the most that may be; of all others the least.
    """
    medians = {name: median(values) for name, values in each_round.items()}
    aims = {name: goal for name, goal in goals.items() if goal is not None}
    return {
        "case": case,
        "ratios": {name: round(value, 4) for name, value in medians.items()},
        "each_round": {name: [round(value, 4) for value in values] for name, values in each_round.items()},
        "goals": aims,
        "reached": {
            name: medians[name] <= goal if name in LESS_IS_BETTER else medians[name] >= goal
            for name, goal in aims.items()
        },
    }


def on_ranks(name: str, ranks: int, function: Any, *arguments: Any) -> list[Any]:
    """What a function returns on each of new processes. Raises UserError naming what was measured when one fails."""
    from engine.forked import RanksFailed, run_forked

    try:
        return run_forked(function, ranks, *arguments, timeout_seconds=TIMEOUT_SECONDS)
    except RanksFailed as error:
        raise UserError(f"{name}: {error.sentence}") from error
