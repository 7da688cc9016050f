"""What each rank of a pipeline computes when, under every schedule, beside the engine's plan for it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from engine.config import ModelConfig, ParallelConfig, ScheduleName
from engine.pipeline.lowering import Interval
from experiments.bench.contender import TOLERANCE, BenchSize, Contender, bench_size
from experiments.bench.timing import Timed, differing_losses, first_losses, in_turn, on_ranks, series
from lineage.benchmark import Benchmark, Case
from lineage.progress import announce

SCHEDULES: dict[ScheduleName, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
"""With their chunks."""
RANKS, MICROBATCHES = 2, 8


def size() -> BenchSize:
    """What is trained, a sequence a microbatch."""
    model = ModelConfig(
        num_layers=8, hidden_size=128, num_heads=4, seq_length=256, vocab_size=1024, padded_vocab_size=1024
    )
    one = bench_size("pipeline", model, 1, iterations=6, warm_up=1)
    return replace(one, train=one.train.model_copy(update={"global_batch_size": MICROBATCHES}))


def measure() -> Benchmark:
    """What two ranks compute when under GPipe, 1F1B and the interleaved schedule, beside the engine's plan.

    Takes some seconds. Ends with code 3 if the losses of two schedules differ.
    """
    return measure_schedules(size())


def measure_schedules(size: BenchSize) -> Benchmark:
    """Train with every schedule and keep the timeline of its fastest iteration.

    Raises UserError naming the schedule whose processes failed.
    """
    announce(f"{len(SCHEDULES)} schedules, {size.train.iterations} iterations each, on {RANKS} processes")
    from engine.guard.timeline import describe_timeline
    from experiments.bench.contenders.ours import build_ours

    contenders = [
        Contender(
            schedule, RANKS, build_ours, microbatches=MICROBATCHES,
            parallel=ParallelConfig(pp=RANKS, schedule=schedule, chunks=chunks),
        )
        for schedule, chunks in SCHEDULES.items()
    ]  # fmt: skip
    taken, load = in_turn(
        "pipeline",
        1,
        {each.name: partial(on_ranks, each.name, each.ranks, time_computations, each, size) for each in contenders},
    )
    cases, trained = [], {}
    for each in contenders:
        (ranks,) = taken[each.name]
        iterations = list(zip(*(timelines for _, timelines in ranks), strict=True))[size.warm_up :]
        seconds = [span(iteration) for iteration in iterations]
        fastest = seconds.index(min(seconds))
        timeline = describe_timeline(size.warm_up + fastest + 1, each.parallel, MICROBATCHES, iterations[fastest])
        trained[each.name] = [Timed(seconds, ranks[0][0])]
        cases.append(summarize(each.name, timeline.to_json(), trained[each.name][0]))
    return Benchmark(
        benchmark="pipeline",
        title="Pipeline schedules, planned and measured",
        cases=cases,
        disagreements=differing_losses("two ranks", trained, TOLERANCE),
        notes=[
            f"{size.model.num_layers} layers, {size.model.hidden_size} wide, {size.model.seq_length} tokens a "
            f"microbatch; fp32, one thread a rank. Shown is the fastest of {size.train.iterations - size.warm_up} "
            "iterations, after one that is not timed.",
            "The bubble is the idle part of the iteration over the busiest rank's time.",
        ],
        setting={"model": size.describe()},
        load_average=load,
    )


def summarize(schedule: str, timeline: dict[str, Any], trained: Timed) -> Case:
    """A schedule's timeline, what its iteration took, and its bubble as planned and as measured."""
    (_, planned), (seconds, measured) = (span_and_bubble(timeline[part]) for part in ("planned", "measured"))
    return Case(
        name=schedule,
        series=[
            series("measured", "iteration", "ms", 1000 * seconds),
            series("planned", "bubble", "", planned, kind="computed"),
            series("measured", "bubble", "", measured),
        ],
        losses=first_losses({schedule: [trained]}),
        timeline=timeline,
    )


def span_and_bubble(ranks: Sequence[Sequence[Sequence[Any]]]) -> tuple[float, float]:
    """Time to the last end, and its idle part over what the busiest rank computed of it."""
    whole = max(rank[-1][4] for rank in ranks)
    return whole, whole / max(sum(end - start for *_, start, end in rank) for rank in ranks) - 1


def time_computations(contender: Contender, size: BenchSize) -> tuple[list[float], list[list[Interval]]]:
    """On a rank: of every iteration the loss, and when this rank computed what."""
    step, losses, timelines = contender.build(contender, size), [], []
    for iteration in range(size.train.iterations):
        timeline: list[Interval] = []
        losses.append(step(iteration, 0.0, timeline))
        timelines.append(timeline)
    return losses, timelines


def span(ranks: Sequence[list[Interval]]) -> float:
    """Seconds from the first start to the last end."""
    return max(rank[-1].end for rank in ranks) - min(rank[0].start for rank in ranks)
