"""What each pipeline rank computed when in one iteration, beside what its schedule plans. Imports no torch."""

from collections.abc import Sequence
from typing import Any

from engine.config import ParallelConfig
from engine.pipeline.lowering import Interval, lower
from engine.pipeline.schedule import compute_orders


def describe_timeline(
    iteration: int, parallel: ParallelConfig, microbatches: int, measured: Sequence[Sequence[Interval]]
) -> dict[str, Any]:
    """The timeline of `iteration` as plain JSON values.

    `planned` and `measured` have a list for each pipeline rank, with [op, microbatch, chunk, start, end] for each
    computation in the order of the rank's program. Planned times are in forward passes of one chunk, a backward pass
    being two; `measured` is in seconds of the clock and comes out in seconds since the first computation began.
    """
    orders = compute_orders(parallel.schedule, parallel.pp, parallel.chunks, microbatches)
    begun = min(interval.start for rank in measured for interval in rank)
    return {
        "iteration": iteration,
        "schedule": parallel.schedule,
        "pp": parallel.pp,
        "chunks": parallel.chunks,
        "microbatches": microbatches,
        "planned": [[_row(interval, 0.0) for interval in rank] for rank in lower(orders, parallel.chunks).timeline],
        "measured": [[_row(interval, begun) for interval in rank] for rank in measured],
    }


def _row(interval: Interval, begun: float) -> list[Any]:
    return [*interval.compute, round(interval.start - begun, 6), round(interval.end - begun, 6)]
