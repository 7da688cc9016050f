"""Pipeline schedules: the engine's plan beside what was measured."""

from collections.abc import Mapping, Sequence
from functools import partial

from lineage.files import Computation, Timeline
from lineage.records import Kind
from reports.exhibit import Exhibit, Table
from reports.figures import pipeline_schedule
from reports.files import file_name
from reports.numbers import exact
from reports.training_runs import Training

PLAN_RULE = (
    "Planned is the list of instructions that the engine runs, if a backward pass takes twice a forward pass and a "
    "message no time; measured is when each rank computed what in one iteration. Idle is what lies between."
)


def pipeline_exhibits(trainings: Mapping[str, Training], kind: Kind, command: str) -> list[Exhibit]:
    """A picture for each run that had a pipeline."""
    timelines = {name: t.timeline for name, t in trainings.items() if t.timeline and t.timeline.pp > 1}
    return [
        Exhibit(
            f"pipeline-{file_name(name)}",
            f"The pipeline of {name} in iteration {timeline.iteration:,}",
            [timeline_caption(timeline)],
            timeline_data([timeline], kind),
            command,
            partial(pipeline_schedule.draw, [timeline]),
            timeline_alt([timeline]),
        )
        for name, timeline in timelines.items()
    ]


def timeline_caption(timeline: Timeline) -> str:
    """How far the measured bubble is from the plan's."""
    return (
        f"{timeline.schedule}: the plan, in which a backward pass takes twice a forward pass and a message no time, "
        f"is idle for {bubble(timeline.planned):.2f} of the busiest rank's time; measured were "
        f"{bubble(timeline.measured):.2f}."
    )


def timeline_alt(timelines: Sequence[Timeline]) -> str:
    """In words what the picture of the schedules has."""
    parts = [
        f"{timeline.schedule} on {timeline.pp} ranks with {timeline.microbatches} microbatches: planned bubble "
        f"{bubble(timeline.planned):.2f}, measured {bubble(timeline.measured):.2f} of the busiest rank's time"
        for timeline in timelines
    ]
    return f"Bars of forward and backward passes by rank over time. {'; '.join(parts)}."


def timeline_data(timelines: Sequence[Timeline], kind: Kind) -> Table:
    """A line for each computation, planned and measured."""
    rows = []
    for timeline in timelines:
        sources: tuple[tuple[Kind, str, Sequence[Sequence[Computation]]], ...] = (
            ("computed", "forward passes", timeline.planned),
            (kind, "s", timeline.measured),
        )
        for what, unit, ranks in sources:
            rows += [
                [timeline.schedule, what, str(rank), *map(str, computation[:3]), *map(exact, computation[3:]), unit]
                for rank, computations in enumerate(ranks)
                for computation in computations
            ]
    return Table(("schedule", "kind", "rank", "pass", "microbatch", "chunk", "start", "end", "unit"), rows, 2)


def bubble(ranks: Sequence[Sequence[Computation]]) -> float:
    """Idle time over the busiest rank's time, from the first start to the last end."""
    busiest = max(sum(end - start for *_, start, end in rank) for rank in ranks)
    begun, ended = min(rank[0][3] for rank in ranks), max(rank[-1][4] for rank in ranks)
    return (ended - begun) / busiest - 1.0 if busiest > 0 else 0.0
