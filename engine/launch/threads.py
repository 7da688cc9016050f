"""Ranks as threads of this process: any layout runs on one CPU, under a debugger, with an ordinary
traceback.

A rank is an ordinary rank program: in its thread `build_mesh` gives it a mesh whose collectives and
messages meet in memory. One rank computes at a time. It holds its world's lock, and releases it
while it waits for another rank; so ranks need no other lock, and a deadlock is noticed at once.
Sums are taken in one binary tree over the ranks.
"""

import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mlm_repro.engine.parallel.mesh import DONE, MAX, SUM, Axis, Pending

_local = threading.local()
_Number = tuple[int, int, int]
"""Type of the key of a message: sender, receiver, and the number of earlier messages from this
sender to this receiver."""


class RanksFailed(RuntimeError):
    """Error of `run_forked`: a rank failed, ended without a result, or was not done in time. Of
    `run_threads`: a rank was not done in time. The attribute `sentence` says which rank and what
    happened; the error's text has below it the traceback of the rank that failed first or, from
    `run_threads`, the stack of the rank that computes. The attribute `lost` is True if the process
    of a rank gave no answer: it ended, or it was not done in time. The text then has nothing below
    the sentence."""

    def __init__(self, sentence: str, details: str, lost: bool = False) -> None:
        super().__init__(f"{sentence}\n{details}")
        self.sentence = sentence
        """First line of the error's text, without the traceback."""
        self.lost = lost
        """True if the process of a rank ended or fell silent without an error of its program; False
        for a thread."""


class ThreadRank(NamedTuple):
    """Identity of a thread that runs a rank: the state that it shares with the other ranks, and its
    rank's number."""

    world: "World"
    rank: int


def current_rank() -> ThreadRank | None:
    """Return a ThreadRank, the number of the rank that this thread runs and the state that this
    rank shares with the other ranks; None outside `run_threads`."""
    return getattr(_local, "rank", None)


def run_threads(
    function: Callable[..., Any], ranks: int, *args: Any, timeout_seconds: float | None = 300.0
) -> list[Any]:
    """Call `function(*args)` in each of `ranks` threads, each of which is one rank, and return a
    list of the results in rank order. One thread computes at a time.

    The first exception of a rank ends the others and is raised here. Raises RuntimeError if all
    remaining ranks wait for each other. Raises RanksFailed, with the stack of a rank that is still
    computing, after `timeout_seconds`, by default 300, or never if that is None; such a rank's
    thread goes on.
    """
    world = World(ranks)
    results = [None] * ranks

    def be_rank(rank: int) -> None:
        _local.rank = ThreadRank(world, rank)
        torch.set_num_threads(1)
        with world.lock:
            try:
                world.computing = rank
                world.check()
                results[rank] = function(*args)
            except _OtherRankFailed:
                pass
            except BaseException as error:
                world.fail(error, rank)
            finally:
                world.leave(rank)

    threads = [
        threading.Thread(target=be_rank, args=(n,), name=f"rank {n}", daemon=True)
        for n in range(ranks)
    ]
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join(deadline and max(deadline - time.monotonic(), 0.0))
    except BaseException as stop:  # Ctrl-C and SIGTERM reach the main thread alone
        with world.lock:
            world.fail(stop, None)
        raise
    if world.failure is None and any(thread.is_alive() for thread in threads):
        stack = traceback.format_stack(
            sys._current_frames().get(threads[world.computing].ident or 0)
        )
        sentence = f"rank {world.computing} was not done after {timeout_seconds:.0f} s"
        world.failure = RanksFailed(sentence, "".join(stack))
    if world.failure is not None:  # ranks that wait end when they wake
        raise world.failure
    return results


class _OtherRankFailed(BaseException):
    """Exception that ends a rank because another failed, all waited for each other, or the caller
    stopped them. It is no `Exception`, so that a rank's program does not catch it by mistake."""


class World:
    """State shared by the ranks of one `run_threads`, which are threads: the lock, the ranks that
    wait and that have ended, messages, collectives and the first failure. Every method is called by
    a thread that holds the lock."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.computing = 0
        """Number of the rank that holds the lock, and so computes."""
        self.failure: BaseException | None = None
        self.meetings: dict[tuple[int, ...], _Meeting] = defaultdict(_Meeting)
        """Dict global ranks of an axis → the collective that they have begun."""
        self.messages: dict[_Number, Tensor] = {}
        """Dict key of a message → the message, from its sending to its receipt."""
        self.sent = Counter[tuple[int, int]]()
        """Dict (sender, receiver) → number of messages sent so far."""
        self.expected = Counter[tuple[int, int]]()
        """Dict (sender, receiver) → number of messages that the receiver has asked for so far."""
        # One condition a rank: waking all at each message made n threads look and n - 1 sleep
        # again.
        self._wakeups = [threading.Condition(self.lock) for _ in range(size)]
        self._awake = set(range(size))
        self._ended = set[int]()

    def wait(self, rank: int, is_ready: Callable[[], bool]) -> None:
        """Let other ranks compute until the calling rank, number `rank`, is woken by the method
        `wake` and the function `is_ready` returns True; return at once if it does already. The
        caller, this rank's thread, holds the lock, which is free for other ranks meanwhile. If no
        other rank can compute, a deadlock is recorded as the world's failure. After each waking it
        calls the method `check`, whose error, raised if the world has a failure, ends this rank."""
        while not is_ready():
            self._fall_asleep(rank)
            while rank not in self._awake:
                self._wakeups[rank].wait()
            self.computing = rank
            self.check()

    def wake(self, rank: int) -> None:
        """Wake the waiting rank with this number, so that it calls its `is_ready` again; the caller
        holds the lock. Nothing happens to a rank that has ended."""
        if rank not in self._ended:
            self._awake.add(rank)
            self._wakeups[rank].notify()

    def check(self) -> None:
        """Raise an error that ends the calling rank, if the world has a failure: another rank's
        exception, a deadlock, a time-out or an interruption. Otherwise nothing happens."""
        if self.failure is not None:
            raise _OtherRankFailed

    def fail(self, error: BaseException, rank: int | None) -> None:
        """Record the exception `error` as the world's failure unless there is one already, and wake
        every rank that has not ended; each ends at its next check. `rank` is the number of the rank
        that raised `error`, and None if no rank caused it. A note with that number is added to
        `error` if `error` is recorded, `rank` is not None and the world has more than one rank.
        Nothing is raised; the caller holds the lock."""
        if self.failure is None:
            self.failure = error
            if rank is not None and self.size > 1:
                error.add_note(f"on rank {rank} of {self.size}")
        for other in range(self.size):
            self.wake(other)

    def leave(self, rank: int) -> None:
        """Mark the rank with this number as ended; the caller, this rank's thread, holds the lock.
        If all remaining ranks wait, record a deadlock as the failure and wake them, which ends
        them."""
        self._ended.add(rank)
        self._fall_asleep(rank)

    def _fall_asleep(self, rank: int) -> None:
        self._awake.discard(rank)
        # Nobody computes and somebody has not ended: processes would hang here until a time-out.
        if not self._awake and len(self._ended) < self.size:
            waiting = sorted(set(range(self.size)) - self._ended)
            error = RuntimeError(
                f"deadlock: {len(waiting)} of {self.size} ranks wait, rank {waiting[0]} among them,"
                " and no rank computes that could answer them"
            )
            self.fail(error, None)


@dataclass
class _Meeting:
    """State of one collective of ranks that are threads: `values`, what each rank that came gave,
    by global rank, and `result`. The last rank to come sets the result and then empties `values`;
    the others wait until `values` is empty."""

    values: dict[int, Any] = field(default_factory=dict)
    result: Any = None


@dataclass
class _Receipt:
    """Pending receipt of a message between ranks that are threads: `wait` lets other ranks compute
    until the message is there, and copies it into `tensor`."""

    world: World
    number: _Number
    tensor: Tensor

    def is_completed(self) -> bool:
        return self.number in self.world.messages

    def wait(self) -> None:
        self.world.wait(self.number[1], self.is_completed)
        self.tensor.copy_(self.world.messages.pop(self.number))


@dataclass(frozen=True)
class ThreadAxis(Axis):
    """Axis whose ranks are threads. A started operation is complete at once, except the receipt of
    a message."""

    world: World = field(default_factory=lambda: World(1), compare=False)
    members: tuple[int, ...] = ()
    """Global ranks along the axis, as a tuple in the axis's order."""

    def _meet(self, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Return the result of `combine` for a list of the values of all ranks of the axis, in the
        axis's order, the same object on every rank. Every rank of the axis calls it. The last rank
        to come computes it, without gradients, while the others wait."""
        meeting = self.world.meetings[self.members]
        me = self.members[self.rank]
        meeting.values[me] = value
        with self.waiting:
            if len(meeting.values) == self.size:
                with torch.no_grad():
                    meeting.result = combine([meeting.values[member] for member in self.members])
                meeting.values.clear()
                del self.world.meetings[self.members]
                for member in self.members:
                    self.world.wake(member)
            else:
                self.world.wait(me, lambda: not meeting.values)
        return meeting.result

    @torch.no_grad()
    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = SUM) -> Tensor:
        if op == SUM:
            return tensor.copy_(self._meet(tensor, _sum))
        of_two = torch.maximum if op == MAX else torch.minimum
        return tensor.copy_(self._meet(tensor, partial(reduce, of_two)))

    def start_reduce(self, tensor: Tensor, owner: int) -> Pending:
        total = self._meet(tensor, _sum)
        if self.rank == owner:
            # On the owner alone, as NCCL does: a program that reads the others' values must fail
            # here too.
            tensor.copy_(total)
        return DONE

    def broadcast(self, tensor: Tensor, owner: int = 0) -> None:
        tensor.copy_(self._meet(tensor, lambda tensors: tensors[owner].clone()))

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return self._meet(tensor, lambda parts: torch.cat(parts, dim=dim)).clone()

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        return self._meet(tensor, _sum).chunk(self.size)[self.rank].clone()

    def gather_objects(self, value: Any) -> list[Any]:
        return list(self._meet(value, list))

    def start_send(self, tensor: Tensor, peer: int) -> Pending:
        route = self.members[self.rank], self.members[peer]
        # A copy: a sender may overwrite its buffer as soon as the message is on its way.
        self.world.messages[*route, self.world.sent[route]] = tensor.clone()
        self.world.sent[route] += 1
        self.world.wake(self.members[peer])
        return DONE

    def start_receive(self, tensor: Tensor, peer: int) -> Pending:
        route = self.members[peer], self.members[self.rank]
        self.world.expected[route] += 1
        return _Receipt(self.world, (*route, self.world.expected[route] - 1), tensor)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape, given in rank order: neighbours are added, then
    neighbouring sums, and so on; of an odd number of them the last waits for the next round. The
    sum of one tensor is the tensor itself."""
    # Always in the order of the ranks, so the bits do not depend on which rank comes last.
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=False)
        rest = parts[len(parts) // 2 * 2 :]
        parts = [left + right for left, right in pairs] + list(rest)
    return parts[0]
