"""The engine's schedule lists, walked with a duration for every stage. Imports no torch.

A computation starts when its rank is free and its input has been computed; a message's time belongs to the computation
that sends it. For equal stages the makespan is (m + (p − 1)/v)(t_f + t_b), as in the 2021 paper, Section 2.2.
"""

from dataclasses import dataclass
from functools import lru_cache

import numba
import numpy as np
from numpy.typing import NDArray

from engine.pipeline.lowering import Interval
from engine.pipeline.schedule import Compute, Op, ScheduleName, compute_orders
from experiments.simulator.workload import Floats


@dataclass(frozen=True)
class Order:
    """A schedule as arrays."""

    codes: NDArray[np.int32]
    """[p, 3, 2·m·v]: forward or backward (0, 1), microbatch, chunk."""
    in_flight: tuple[int, ...]
    """Of each rank, the most forward passes of a chunk that wait for their backward."""


@lru_cache(maxsize=1024)
def schedule_order(name: ScheduleName, pp: int, chunks: int, microbatches: int) -> Order:
    """The engine's order of computation on every rank."""
    orders = compute_orders(name, pp, chunks, microbatches)
    codes = np.array(
        [
            [[c.op is Op.BACKWARD for c in order], [c.microbatch for c in order], [c.chunk for c in order]]
            for order in orders
        ],
        np.int32,
    )
    waiting = (1 - 2 * codes[:, 0]).cumsum(axis=1)
    return Order(codes, tuple(waiting.max(axis=1).tolist()))


def order_of(pp: int, chunks: int, microbatches: int) -> Order:
    """1F1B, interleaved where there are several chunks."""
    return schedule_order("interleaved" if chunks > 1 else "1f1b", pp, chunks, microbatches)


@numba.njit(cache=True)
def _end_times(codes: NDArray[np.int32], forward: Floats, backward: Floats) -> Floats:  # pragma: no cover
    ranks, _, count = codes.shape
    stages = forward.shape[0]
    microbatches = count * ranks // (2 * stages)
    done = np.full((2, stages, microbatches), -1.0)
    ends = np.zeros((ranks, count))
    position = np.zeros(ranks, np.int64)
    free = np.zeros(ranks)
    finished, before = 0, -1
    while finished != before:
        before = finished
        for rank in range(ranks):
            while position[rank] < count:
                kind, microbatch, chunk = codes[rank, :, position[rank]]
                stage = chunk * ranks + rank
                ready = 0.0
                if kind == 0 and stage > 0:
                    ready = done[0, stage - 1, microbatch]
                elif kind == 1:
                    ready = done[1, stage + 1, microbatch] if stage + 1 < stages else done[0, stage, microbatch]
                if ready < 0.0:
                    break
                free[rank] = max(free[rank], ready) + (forward[stage] if kind == 0 else backward[stage])
                done[kind, stage, microbatch] = free[rank]
                ends[rank, position[rank]] = free[rank]
                position[rank] += 1
                finished += 1
    return ends


@numba.njit(cache=True)
def _last_ends(codes: NDArray[np.int32], forward: Floats, backward: Floats) -> Floats:  # pragma: no cover
    found = np.empty(len(forward))
    for number in range(len(forward)):
        found[number] = _end_times(codes, forward[number], backward[number]).max()
    return found


def makespan_seconds(order: Order, forward: Floats, backward: Floats) -> Floats:
    """From the first forward to the end of the last backward, [n]; durations are per stage, [n, stages]."""
    return _last_ends(order.codes, forward, backward)


def timeline(order: Order, forward: Floats, backward: Floats) -> list[list[Interval]]:
    """When each rank computes what."""
    ends = _end_times(order.codes, forward, backward).tolist()
    durations = {Op.FORWARD: forward, Op.BACKWARD: backward}
    found = []
    for rank, codes in enumerate(order.codes.tolist()):
        computes = [Compute(tuple(Op)[kind], microbatch, chunk) for kind, microbatch, chunk in zip(*codes, strict=True)]
        lengths = [float(durations[one.op][one.chunk * len(ends) + rank]) for one in computes]
        found.append([Interval(*each) for each in zip(computes, np.subtract(ends[rank], lengths), ends[rank],
                                                      strict=True)])  # fmt: skip
    return found
