"""Pipeline schedules as pure data: the order in which each rank computes.

Imports no torch. p pipeline ranks, v chunks per rank, m microbatches. Stage = chunk · p + rank is a
global position in the pipeline.
"""

from enum import StrEnum
from itertools import chain, product
from typing import NamedTuple

from mlm_repro.engine.config import ScheduleName
from mlm_repro.lineage.errors import BadInput


class Op(StrEnum):
    """Direction of a pass of one microbatch through a stage of the pipeline: forward or
    backward."""

    FORWARD = "F"
    BACKWARD = "B"


class Compute(NamedTuple):
    """One forward or backward pass, as `op` says, of one microbatch through one stage of a rank.
    `microbatch` is its number in the iteration, `chunk` the number of the stage among the rank's
    stages, both from 0."""

    op: Op
    microbatch: int
    chunk: int = 0


def check_schedule(name: ScheduleName, pp: int, chunks: int, microbatches: int) -> None:
    """Raise BadInput where the schedule `name` is not defined for these numbers: several chunks
    without interleaving, or interleaving with a number of microbatches on a data-parallel rank that
    is not a multiple of pp (2021 paper, Section 2.2). Nothing is returned."""
    if name != "interleaved" and chunks != 1:
        raise BadInput(
            f"the {name} schedule has one chunk, one stage, on each rank, not {chunks}: interleaved"
            " is the schedule for several"
        )
    # Microbatches go through the chunks in groups of p, and the order of an incomplete group is not
    # defined.
    if name == "interleaved" and (beyond := microbatches % pp):
        near = " or ".join(
            str(count) for count in (microbatches - beyond, microbatches - beyond + pp) if count
        )
        raise BadInput(
            f"the interleaved schedule needs a multiple of pp = {pp} microbatches on each"
            f" data-parallel rank, not {microbatches}: it can have {near}"
        )


def compute_orders(
    name: ScheduleName, pp: int, chunks: int, microbatches: int
) -> list[list[Compute]]:
    """Return for every pipeline rank a list of its passes, forward and backward, in the order in
    which the schedule `name` computes them. Raises BadInput for several chunks without
    interleaving, and for interleaving with a number of microbatches that is not a multiple of
    pp."""
    every = passes(pp, chunks, microbatches)
    return [
        [every[number] for number in order] for order in pass_orders(name, pp, chunks, microbatches)
    ]


def forward_orders(pp: int, chunks: int, microbatches: int) -> list[list[Compute]]:
    """Return for every pipeline rank the list of its forward passes alone, Computes, as validation
    runs them: by microbatch, then by chunk. It is the same list object for each rank."""
    # One order for all ranks: without backward passes nobody has to make room.
    order = [
        Compute(Op.FORWARD, microbatch, chunk)
        for microbatch, chunk in product(range(microbatches), range(chunks))
    ]
    return [order for _ in range(pp)]


def passes(pp: int, chunks: int, microbatches: int) -> list[Compute]:
    """Return a list of all Computes of a pipeline rank, the same for each of `pp` ranks: the
    forward passes, then the backward passes. Microbatches go in groups of pp: a group goes through
    a rank's `chunks` stages one after the other (in the backward passes from the last to the
    first), and through each stage microbatch by microbatch; then the next group follows. With
    several chunks `microbatches` must be a multiple of pp, which is not checked."""
    every = []
    for op in Op:
        for number in range(microbatches * chunks):
            # Microbatches go through the chunks in groups of p, so that chunk 1 can begin before
            # chunk 0 has seen them all.
            group, place = divmod(number, pp * chunks)
            chunk = place // pp
            if op is Op.BACKWARD:
                chunk = chunks - 1 - chunk
            every.append(Compute(op, group * pp + place % pp, chunk))
    return every


def pass_orders(name: ScheduleName, pp: int, chunks: int, microbatches: int) -> list[list[int]]:
    """Return for every pipeline rank the order of its passes under the schedule `name`, as a list
    of indices into the list that the function `passes` returns. Raises BadInput for several chunks
    without interleaving, and for interleaving with a number of microbatches that is not a multiple
    of pp.

    GPipe: all forward passes, then all backward passes, so the activations of all microbatches are
    in flight. 1F1B (PipeDream-Flush): warm-up forwards, one forward and one backward in turn, the
    remaining backwards. With several chunks this is the interleaved schedule of the 2021 paper
    (Figure 4): groups of p microbatches pass through all chunks in turn, and warm-up is 2(p − rank
    − 1) + (v − 1)p instead of p − rank − 1, for p ranks with v chunks each.
    """
    check_schedule(name, pp, chunks, microbatches)
    total = microbatches * chunks
    orders = []
    for rank in range(pp):
        # Earlier ranks warm up longer: a rank's first backward pass has to come back through all
        # ranks behind it.
        warmup = total if name == "gpipe" else min(total, _warmup(pp, rank, chunks))
        end = 2 * total - warmup
        in_turn = chain.from_iterable(zip(range(warmup, total), range(total, end), strict=True))
        orders.append([*range(warmup), *in_turn, *range(end, 2 * total)])
    return orders


def _warmup(pp: int, rank: int, chunks: int) -> int:
    """Return the number of forward passes that a rank makes before forward and backward alternate,
    in 1F1B (one chunk) or the interleaved schedule. It does not depend on the microbatches: the
    caller takes the number of all forward passes instead if that is less."""
    return pp - rank - 1 if chunks == 1 else 2 * (pp - rank - 1) + (chunks - 1) * pp


def ideal_bubble(name: ScheduleName, pp: int, chunks: int, microbatches: int) -> float:
    """Return, as a share such as 0.25, a pipeline rank's idle time divided by the time that it
    computes: (p − 1)/m for p ranks and m microbatches, divided by the number of chunks if the
    schedule `name` is `interleaved` (2021 paper, Section 2.2)."""
    return (pp - 1) / (microbatches * (chunks if name == "interleaved" else 1))


def peaks_in_flight(name: ScheduleName, pp: int, chunks: int, microbatches: int) -> list[int]:
    """Return a list with, for each pipeline rank, the largest number of forward passes, over all
    its chunks, that wait for their backward pass at one time.

    Raises BadInput for several chunks without interleaving, and for interleaving with a number of
    microbatches that is not a multiple of pp.
    """
    check_schedule(name, pp, chunks, microbatches)
    # Every forward pass precedes every backward pass, so all activations wait.
    if name == "gpipe":
        return [microbatches] * pp
    # One more than the warm-up: a rank that alternates begins with a forward pass.
    return [min(microbatches * chunks, _warmup(pp, rank, chunks) + 1) for rank in range(pp)]
