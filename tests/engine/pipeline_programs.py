"""Holds the programs of a pipeline's ranks against what is asked of them, apart from how they were
made."""

from collections.abc import Iterable, Sequence
from itertools import combinations

from mlm_repro.engine.pipeline.lowering import Instruction, Message
from mlm_repro.engine.pipeline.schedule import Op


def check_programs(
    programs: Sequence[Sequence[Instruction]],
    chunks: int,
    microbatches: int,
    passes: Iterable[Op] = tuple(Op),
) -> None:
    """Raise ValueError unless the programs are complete and safe.

    Each chunk makes each of the `passes` of each microbatch once, the forward pass first; each
    message is sent and received once, in the same order at both ends; what is consumed was received
    before.
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
        theirs = [
            message._replace(send=not message.send, peer=high)
            for message in _between(programs[high], low)
        ]
        if _between(programs[low], high) != theirs:
            raise ValueError(f"ranks {low} and {high} disagree about the order of their messages")


def _between(program: Sequence[Instruction], peer: int) -> list[Message]:
    return [i for i in program if isinstance(i, Message) and i.peer == peer]
