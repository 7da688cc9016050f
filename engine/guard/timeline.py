"""What each pipeline rank computed when in the last iteration, beside what its schedule plans. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import ParallelConfig, RunConfig
from engine.guard import Guard, Iteration
from engine.pipeline.lowering import Interval, lower
from engine.pipeline.schedule import compute_orders
from engine.run.directory import TIMELINE
from lineage.atomic import write_text
from lineage.files import Computation, Timeline

if TYPE_CHECKING:
    from engine.step import TrainingStep


class TimelineGuard(Guard):
    """Has the last iteration timed, and writes what the pipeline of the first tensor- and data-parallel ranks did."""

    def __init__(self, run: Path, config: RunConfig, step: "TrainingStep") -> None:
        self._path, self._config, self._step = run / TIMELINE, config, step

    def before(self, number: int) -> None:
        """Have the last iteration timed."""
        if number + 1 == self._config.train.iterations:
            self._step.timeline = []

    def after(self, iteration: Iteration) -> str:
        """Write the timeline."""
        mine, mesh = self._step.timeline, self._step.mesh
        if mine is not None:
            self._step.timeline = None
            everyone, layout = mesh.gather_objects(mine), mesh.layout
            if mesh.is_first:
                pipeline = [everyone[layout.rank(0, rank, 0)] for rank in range(layout.pp)]
                described = describe_timeline(
                    iteration.number + 1, self._config.parallel, len(iteration.microbatches), pipeline
                )
                write_text(self._path, described.to_line())
        return ""


def describe_timeline(
    iteration: int, parallel: ParallelConfig, microbatches: int, measured: Sequence[Sequence[Interval]]
) -> Timeline:
    """The timeline of `iteration`.

    `planned` and `measured` have a list for each pipeline rank, with [op, microbatch, chunk, start, end] for each
    computation in the order of the rank's program. Planned times are in forward passes of one chunk, a backward pass
    being two; `measured` is in seconds of the clock and comes out in seconds since the first computation began.
    """
    orders = compute_orders(parallel.schedule, parallel.pp, parallel.chunks, microbatches)
    begun = min(interval.start for rank in measured for interval in rank)
    return Timeline(
        iteration=iteration,
        schedule=parallel.schedule,
        pp=parallel.pp,
        chunks=parallel.chunks,
        microbatches=microbatches,
        planned=[[_row(interval, 0.0) for interval in rank] for rank in lower(orders, parallel.chunks).timeline],
        measured=[[_row(interval, begun) for interval in rank] for rank in measured],
    )


def _row(interval: Interval, begun: float) -> Computation:
    op, microbatch, chunk = interval.compute
    return op.value, microbatch, chunk, round(interval.start - begun, 6), round(interval.end - begun, 6)
