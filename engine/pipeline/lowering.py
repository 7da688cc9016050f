"""Turns orders of computation into programs with messages, with their timing and proof. Imports no torch.

Messages are inserted from one global order shared by all ranks. Inserted rank by rank they deadlock for nearly every
interleaved schedule when a send waits for its receive; in one global order the earliest unfinished message always has
both its ends ready.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from mlm_repro.engine.pipeline.schedule import Compute, Op


class Message(NamedTuple):
    """One end of a point-to-point transfer."""

    send: bool
    payload: Op
    """FORWARD: an activation; BACKWARD: the gradient of one."""
    microbatch: int
    stage: int
    """The stage whose computation consumes the payload."""
    peer: int
    """Pipeline rank at the other end."""


Instruction = Compute | Message


class Interval(NamedTuple):
    """Start and end of a computation."""

    compute: Compute
    start: float
    end: float


DURATIONS = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0}
"""Times of one chunk's passes."""


@dataclass(frozen=True)
class Lowered:
    """Programs of all ranks and the timing assumed when they were made."""

    programs: list[list[Instruction]]
    timeline: list[list[Interval]]

    @property
    def makespan(self) -> float:
        """Time from the first forward to the last backward."""
        return max(intervals[-1].end for intervals in self.timeline)

    @property
    def bubble(self) -> float:
        """Idle over ideal time of the busiest rank."""
        busiest = max(sum(i.end - i.start for i in intervals) for intervals in self.timeline)
        return self.makespan / busiest - 1.0


def lower(orders: Sequence[Sequence[Compute]], chunks: int) -> Lowered:
    """Insert every message where the producing computation ends, walking all ranks in time together.

    Raises ValueError if the orders cannot proceed or the programs are not complete and safe (`check_programs`).
    """
    pp = len(orders)
    last = pp * chunks - 1
    programs: list[list[Instruction]] = [[] for _ in orders]
    timeline: list[list[Interval]] = [[] for _ in orders]
    arrived: set[tuple[Op, int, int]] = set()
    position, idle = [0] * pp, [True] * pp
    running: list[tuple[float, int, Compute]] = []

    def try_start(rank: int, now: float) -> None:
        if not idle[rank] or position[rank] == len(orders[rank]):
            return
        compute = orders[rank][position[rank]]
        stage = compute.chunk * pp + rank
        first_of_all = stage == (0 if compute.op is Op.FORWARD else last)
        if first_of_all or (compute.op, compute.microbatch, stage) in arrived:
            position[rank] += 1
            idle[rank] = False
            end = now + DURATIONS[compute.op]
            programs[rank].append(compute)
            timeline[rank].append(Interval(compute, now, end))
            heapq.heappush(running, (end, rank, compute))

    for rank in range(pp):
        try_start(rank, 0.0)
    while running:
        now, rank, compute = heapq.heappop(running)
        idle[rank] = True
        stage = compute.chunk * pp + rank
        target = stage + (1 if compute.op is Op.FORWARD else -1)
        if 0 <= target <= last:
            peer = target % pp
            arrived.add((compute.op, compute.microbatch, target))
            if peer != rank:
                programs[rank].append(Message(True, compute.op, compute.microbatch, target, peer))
                programs[peer].append(Message(False, compute.op, compute.microbatch, target, rank))
            try_start(peer, now)
        try_start(rank, now)
    if any(position[rank] < len(orders[rank]) for rank in range(pp)):
        raise ValueError("the schedule cannot make progress")
    passes = {compute.op for compute in orders[0]}
    check_programs(programs, chunks, len(orders[0]) // (chunks * len(passes)), passes)
    return Lowered(programs, timeline)


def check_programs(
    programs: Sequence[Sequence[Instruction]], chunks: int, microbatches: int, passes: Iterable[Op] = tuple(Op)
) -> None:
    """Raise ValueError unless the programs are complete and safe.

    Each chunk makes each of the `passes` of each microbatch once, the forward pass first; each message is sent and
    received once, in the same order at both ends; what is consumed was received before.
    """
    pp = len(programs)
    last = pp * chunks - 1
    for rank, program in enumerate(programs):
        expected = {(op, m, c) for op in passes for m in range(microbatches) for c in range(chunks)}
        seen: set[tuple[Op, int, int]] = set()
        received: set[tuple[Op, int, int]] = set()
        for instruction in program:
            if isinstance(instruction, Message):
                key = (instruction.payload, instruction.microbatch, instruction.stage)
                produced = instruction.stage + (-1 if instruction.payload is Op.FORWARD else 1)
                if instruction.send and (key[0], key[1], produced // pp) not in seen:
                    raise ValueError(f"rank {rank} sends {instruction} before it is computed")
                if not instruction.send:
                    received.add(key)
                continue
            op, microbatch, chunk = instruction
            stage = chunk * pp + rank
            from_rank = (stage + (-1 if op is Op.FORWARD else 1)) % pp
            at_end = stage == (0 if op is Op.FORWARD else last)
            if not at_end and from_rank != rank and (op, microbatch, stage) not in received:
                raise ValueError(f"rank {rank} runs {instruction} before its input arrives")
            if op is Op.BACKWARD and (Op.FORWARD, microbatch, chunk) not in seen:
                raise ValueError(f"rank {rank} runs {instruction} before its forward pass")
            if tuple(instruction) in seen:
                raise ValueError(f"rank {rank} runs {instruction} twice")
            seen.add((op, microbatch, chunk))
        if seen != expected:
            raise ValueError(f"rank {rank} leaves out {sorted(expected - seen)[:3]}")
    for low, high in combinations(range(pp), 2):
        theirs = [message._replace(send=not message.send, peer=high) for message in _between(programs[high], low)]
        if _between(programs[low], high) != theirs:
            raise ValueError(f"ranks {low} and {high} disagree about the order of their messages")


def _between(program: Sequence[Instruction], peer: int) -> list[Message]:
    return [i for i in program if isinstance(i, Message) and i.peer == peer]
