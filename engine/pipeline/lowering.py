"""Turns orders of computation into programs with messages, with their timing. Imports no torch.

Messages are inserted from one global order shared by all ranks. Inserted rank by rank they deadlock
for nearly every interleaved schedule when a send waits for its receive; in one global order the
earliest unfinished message always has both its ends ready.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product, starmap
from typing import NamedTuple

from mlm_repro.engine.pipeline.schedule import Compute, Op


class Message(NamedTuple):
    """Instruction of a rank's program: send a payload of one microbatch to the pipeline rank `peer`
    if `send` is True, else receive it from that rank. A payload is an activation or the gradient of
    one, as the Op `payload` says. `stage` is the stage whose computation takes it, on the
    receiver."""

    send: bool
    payload: Op
    """Kind of the payload: FORWARD for an activation, BACKWARD for the gradient of one."""
    microbatch: int
    stage: int
    """Number of the stage, counted over all ranks, whose computation consumes the payload."""
    peer: int
    """Pipeline rank at the other end of the message."""


Instruction = Compute | Message


class Interval(NamedTuple):
    """A forward or backward pass, `compute`, with its start and end in simulated time, in units of
    a forward pass."""

    compute: Compute
    start: float
    end: float


# A backward pass has two products for each one of a forward pass.
DURATIONS = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0}
"""Direction of a pass → assumed duration of this pass of a chunk, in units of a forward pass."""


@dataclass(frozen=True)
class Lowered:
    """Programs of all pipeline ranks (a program is a list of passes, sends and receives) and the
    simulated times of the passes, in units of a forward pass. `programs` and `timeline` each have a
    list for each rank, in rank order: its instructions, and an Interval for each of its passes,
    both in order."""

    programs: list[list[Instruction]]
    timeline: list[list[Interval]]

    @property
    def makespan(self) -> float:
        """Simulated time from the first forward to the last backward pass of all ranks, in units of
        a forward pass."""
        return max(intervals[-1].end for intervals in self.timeline)

    @property
    def bubble(self) -> float:
        """Share such as 0.25: idle time of the pipeline rank that computes longest, from the first
        pass to the last of all ranks, divided by the time that this rank computes."""
        busiest = max(sum(i.end - i.start for i in intervals) for intervals in self.timeline)
        return self.makespan / busiest - 1.0


def lower(orders: Sequence[Sequence[Compute]], chunks: int) -> Lowered:
    """Return a Lowered: each pipeline rank's program and the timeline of its passes. `orders` has,
    for each rank with `chunks` stages, its passes in order. A program has these passes, and every
    message where the computation that produces the payload ends. All ranks are walked in time
    together; a forward pass is assumed to last 1, a backward pass 2 and a message no time.

    A pass starts when its input has arrived, which for the loss's own backward pass is when its
    forward pass has ended; so no rank waits for what comes later. Raises ValueError if an order is
    not every pass once, or cannot proceed.
    """
    pp = len(orders)
    last = pp * chunks - 1
    passes = {compute.op for compute in orders[0]}
    microbatches = range(len(orders[0]) // (chunks * len(passes)))
    complete = sorted(starmap(Compute, product(passes, microbatches, range(chunks))))
    # Checked once here: a schedule that drops a pass would train, and only its gradients would be
    # wrong.
    if any(sorted(order) != complete for order in orders):
        raise ValueError(
            "an order of the schedule leaves out a pass or makes one twice: give each rank every"
            " pass of its stages once"
        )
    programs: list[list[Instruction]] = [[] for _ in orders]
    timeline: list[list[Interval]] = [[] for _ in orders]
    arrived: set[tuple[Op, int, int]] = set()
    position = [0] * pp
    idle = [True] * pp
    # The walk is in time because ranks meet in time: of two messages the one that is ready first is
    # sent first.
    running: list[tuple[float, int, Compute]] = []

    def try_start(rank: int, now: float) -> None:
        if not idle[rank] or position[rank] == len(orders[rank]):
            return
        compute = orders[rank][position[rank]]
        stage = compute.chunk * pp + rank
        enters = compute.op is Op.FORWARD and stage == 0
        if enters or (compute.op, compute.microbatch, stage) in arrived:
            position[rank] += 1
            idle[rank] = False
            end = now + DURATIONS[compute.op]
            programs[rank].append(compute)
            timeline[rank].append(Interval(compute, now, end))
            heapq.heappush(running, (end, rank, compute))

    for rank in range(pp):
        try_start(rank, 0.0)
    while running:
        # Ties go to the lower rank, so that all ranks, each of which lowers the schedule, agree.
        now, rank, compute = heapq.heappop(running)
        idle[rank] = True
        stage = compute.chunk * pp + rank
        target = stage + (1 if compute.op is Op.FORWARD else -1)
        if target > last:
            # The loss turns a microbatch back on the same rank: no message.
            arrived.add((Op.BACKWARD, compute.microbatch, last))
        elif target >= 0:
            peer = target % pp
            arrived.add((compute.op, compute.microbatch, target))
            # With one rank, or chunks that follow each other on one rank, the payload stays where
            # it is.
            if peer != rank:
                programs[rank].append(Message(True, compute.op, compute.microbatch, target, peer))
                # The receive is posted at the moment of the send, behind what the peer was told
                # before, so the k-th send of a pair always meets its k-th receive: gloo and NCCL
                # match messages by order, not by name.
                programs[peer].append(Message(False, compute.op, compute.microbatch, target, rank))
            try_start(peer, now)
        try_start(rank, now)
    if any(position[rank] < len(orders[rank]) for rank in range(pp)):
        raise ValueError(
            "the schedule cannot proceed: the next pass of each rank waits for one that comes later"
        )
    return Lowered(programs, timeline)
