"""The engine's schedule lists, walked with a duration for every stage. Imports no torch.

A computation starts when its rank is free and its input has been computed; a message's time belongs to the computation
that sends it. For equal stages the makespan is (m + (p − 1)/v)(t_f + t_b), as in the 2021 paper, Section 2.2.
"""

from functools import lru_cache

import numba
import numpy as np
from numpy.typing import NDArray

from engine.pipeline.schedule import Op, compute_orders
from experiments.simulator.workload import Floats

Order = NDArray[np.int32]
"""Computations of every rank in order, [p, 3, 2·m·v]: forward or backward (0, 1), microbatch, chunk."""


@lru_cache(maxsize=1024)
def order_of(pp: int, chunks: int, microbatches: int) -> Order:
    """The engine's order of computation, not to be changed: 1F1B, interleaved where there are several chunks."""
    orders = compute_orders("interleaved" if chunks > 1 else "1f1b", pp, chunks, microbatches)
    return np.array(
        [
            [[c.op is Op.BACKWARD for c in order], [c.microbatch for c in order], [c.chunk for c in order]]
            for order in orders
        ],
        np.int32,
    )


@numba.njit(cache=True)
def end_times(codes: Order, forward: Floats, backward: Floats) -> Floats:  # pragma: no cover
    """End of each computation of each rank, [p, 2·m·v]; durations are per stage."""
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
def makespan_seconds(codes: Order, forward: Floats, backward: Floats) -> Floats:  # pragma: no cover
    """Time from the first forward to the end of the last backward pass, [n]; durations are per stage, [n, stages]."""
    ends = np.empty(len(forward))
    for number in range(len(forward)):
        ends[number] = end_times(codes, forward[number], backward[number]).max()
    return ends
