"""What each rank of a pipeline computes when, under every schedule, beside the engine's plan for it."""

import os
from collections.abc import Sequence
from typing import Any

from engine.config import ModelConfig, ParallelConfig, TrainConfig
from engine.guard.timeline import describe_timeline
from engine.pipeline.lowering import Interval
from experiments.bench.contenders import Contender
from experiments.bench.ours import build_ours
from experiments.bench.parallel import TOLERANCE
from experiments.bench.sizes import BenchSize
from experiments.bench.timing import on_ranks
from lineage.environment import available_cores, describe_environment
from lineage.progress import Progress, announce

SCHEDULES = (
    ParallelConfig(pp=2, schedule="gpipe"),
    ParallelConfig(pp=2, schedule="1f1b"),
    ParallelConfig(pp=2, schedule="interleaved", chunks=2),
)
MICROBATCHES = 8
SIZE = BenchSize(
    "pipeline",
    ModelConfig(num_layers=8, hidden_size=128, num_heads=4, seq_length=256, vocab_size=1024, padded_vocab_size=1024),
    TrainConfig(
        iterations=6, global_batch_size=MICROBATCHES, microbatch_size=1, learning_rate=1e-3, warmup_iterations=0,
        precision="fp32",
    ),
    warm_up=1,
)  # fmt: skip


def measure_pipeline(size: BenchSize = SIZE) -> dict[str, Any]:
    """Train with every schedule and keep its fastest iteration's timeline; the result as plain JSON values.

    Raises UserError naming the schedule whose processes failed.
    """
    timelines, load = [], [round(os.getloadavg()[0], 2)]
    losses: dict[str, list[float]] = {}
    announce(f"{len(SCHEDULES)} schedules, {size.train.iterations} iterations each, on {SCHEDULES[0].pp} processes")
    with Progress("pipeline", len(SCHEDULES), "schedules") as progress:
        for parallel in SCHEDULES:
            contender = Contender(
                parallel.schedule, parallel.pp, build_ours, parallel=parallel, microbatches=MICROBATCHES
            )
            ranks = on_ranks(parallel.schedule, parallel.pp, time_computations, contender, size)
            losses[parallel.schedule] = ranks[0][0]
            iterations = list(zip(*(each for _, each in ranks), strict=True))[size.warm_up :]
            fastest = min(range(len(iterations)), key=lambda number: span(iterations[number]))
            number = size.warm_up + fastest + 1
            timelines.append(describe_timeline(number, parallel, MICROBATCHES, iterations[fastest]))
            load.append(round(os.getloadavg()[0], 2))
            progress.advance(1, parallel.schedule)
    return {
        "benchmark": "pipeline",
        "model": size.describe(),
        "timelines": timelines,
        "losses": losses,
        "disagreements": disagreements(losses),
        "load_average": load,
        "notes": [
            f"{size.model.num_layers} layers, {size.model.hidden_size} wide, {size.model.seq_length} tokens a "
            f"microbatch; fp32, one thread a rank. Shown is the fastest of {size.train.iterations - size.warm_up} "
            "iterations, after one that is not timed.",
            f"The load average of the machine, which the {SCHEDULES[0].pp} ranks are part of, was {min(load)} to "
            f"{max(load)} on {available_cores()} cores.",
        ],
        "environment": describe_environment(),
    }


def time_computations(contender: Contender, size: BenchSize) -> tuple[list[float], list[list[Interval]]]:
    """On a rank: of every iteration the loss, and when this rank computed what."""
    step, losses, timelines = build_ours(contender, size), [], []
    for iteration in range(size.train.iterations):
        timeline: list[Interval] = []
        losses.append(step(iteration, 0.0, timeline))
        timelines.append(timeline)
    return losses, timelines


def span(ranks: Sequence[list[Interval]]) -> float:
    """Seconds from the first start to the last end."""
    return max(rank[-1].end for rank in ranks) - min(rank[0].start for rank in ranks)


def disagreements(losses: dict[str, list[float]]) -> list[str]:
    """A sentence for each schedule whose losses are not those of the first."""
    first, *others = losses
    gaps = {name: max(abs(a - b) for a, b in zip(losses[name], losses[first], strict=True)) for name in others}
    return [
        f"losses of {name} differ from those of {first} by up to {gap:.4g}"
        for name, gap in gaps.items()
        if not gap <= TOLERANCE
    ]
