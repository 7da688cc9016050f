"""The mesh of ranks, an object that is passed in; there is no module-level parallel state.

An `Axis` is what a rank needs of the ranks beside it: collectives and messages. `LoneAxis` has one
rank; `GroupAxis` speaks through a process group; in `engine/launch/threads.py` the ranks are
threads of one process.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.engine.torch_names import reduce_scatter_single
from mlm_repro.lineage.errors import UserError

SUM = dist.ReduceOp.SUM
MAX = dist.ReduceOp.MAX
MIN = dist.ReduceOp.MIN


class Waiting:
    """Context manager that adds to its own `seconds` the wall time inside the block, for this
    rank's communication. On CPUs that is mostly waiting for other ranks; on GPUs, which communicate
    in the background, it is little more than the time to queue the communication."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, *failure: object) -> None:
        self.seconds += time.monotonic() - self._start


class Pending(Protocol):
    """Interface of a communication in progress, which the methods `start_…` of an `Axis` return:
    `is_completed` tells if it has ended, and `wait` waits for it."""

    def wait(self) -> object:
        """Wait until the communication is complete; a tensor that is received or reduced has its
        values then. On GPUs the host goes on, and only the device's later work waits. What is
        returned has no meaning."""

    def is_completed(self) -> bool:
        """Return True if the communication is complete, without waiting."""


class _Done:
    def wait(self) -> None:
        return

    def is_completed(self) -> bool:
        return True


DONE = _Done()


@dataclass(frozen=True)
class Axis(ABC):
    """One axis of the mesh as this rank sees it: its number of ranks `size`, this rank's index
    `rank` on it, and the communication among them. Subclasses define the communication for ranks
    that are processes, threads or alone. Every collective is called by all ranks of the axis, in
    one order."""

    # An axis knows no process group, so that ranks that are threads, and a rank whose peers are
    # absent, are axes too.
    size: int
    rank: int
    waiting: Waiting = field(default_factory=Waiting, compare=False)
    """Timer of this rank's communication, on GPUs only of the time to queue it; `build_mesh` gives
    one to all axes."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = SUM) -> Tensor:
        """Reduce in place the tensors that the ranks of the axis give, of one shape, by default to
        their sum (`op`), and return the tensor itself. Every rank of the axis calls it and gets the
        same values."""

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        """Begin to replace `tensor` in place by its sum with the tensors, of the same shape, that
        the other ranks of the axis give; every rank calls it. Return a Pending: after its `wait`
        each rank has the sum, and until then none may use `tensor`. Only an axis of processes works
        in the background; on any other the sum is complete on return."""
        # An axis that cannot work in the background is done when it returns.
        self.all_reduce(tensor)
        return DONE

    @abstractmethod
    def start_reduce(self, tensor: Tensor, owner: int) -> Pending:
        """Begin to sum in place, on rank `owner` of the axis, the tensors that all its ranks give,
        of one shape, and return the Pending to wait for; the values of the other ranks' tensors are
        undefined afterwards. Every rank of the axis calls it. A subclass may instead complete the
        sum before it returns."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, owner: int = 0) -> None:
        """Copy the tensor of rank `owner` of the axis, by default its first, into the `tensor` of
        every rank of the axis, in place; nothing is returned. Every rank of the axis calls it, with
        tensors of one shape."""

    @abstractmethod
    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the tensors of all ranks of the axis, which have one shape, joined along the dim
        `dim` in rank order, on every rank; with one rank the tensor itself. Every rank of the axis
        calls it."""

    @abstractmethod
    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Return this rank's share of the sum of all ranks' tensors, which have one shape: the sum
        is cut along dim 0 into as many equal shares, in rank order, as the axis has ranks; with one
        rank it is the tensor itself. Every rank of the axis calls it."""

    @abstractmethod
    def gather_objects(self, value: Any) -> list[Any]:
        """Return a list of the values, any Python objects that can be pickled, that the ranks of
        the axis give, in rank order, on every rank: copies of other processes' objects, but the
        very objects of ranks that are threads. Every rank of the axis calls it."""

    def barrier(self) -> None:
        """Wait until every rank of the axis has called this method."""
        self.gather_objects(None)

    @abstractmethod
    def start_send(self, tensor: Tensor, peer: int) -> Pending:
        """Begin to send a contiguous tensor to rank `peer` of the axis, and return the Pending to
        wait for. The tensor must not change until the communication is complete."""

    @abstractmethod
    def start_receive(self, tensor: Tensor, peer: int) -> Pending:
        """Begin to fill a contiguous tensor in place with the next tensor that rank `peer` of the
        axis sends to this rank, and return the Pending to wait for."""


@dataclass(frozen=True)
class LoneAxis(Axis):
    """An axis of one rank: a collective leaves its tensor as it is, and one whose result is a
    tensor returns its argument; `gather_objects` returns a list of its value alone; to send or to
    receive raises NotImplementedError.

    With another `size` it stands for an axis whose other ranks are not there, so that a model built
    on `meta` has one rank's shapes; its collectives still do nothing.
    """

    size: int = 1
    rank: int = 0

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = SUM) -> Tensor:
        return tensor

    def start_reduce(self, tensor: Tensor, owner: int) -> Pending:
        return DONE

    def broadcast(self, tensor: Tensor, owner: int = 0) -> None:
        pass

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def start_send(self, tensor: Tensor, peer: int) -> Pending:
        raise NotImplementedError("one rank alone has nobody to send to or to receive from")

    start_receive = start_send


@dataclass(frozen=True)
class GroupAxis(Axis):
    """An axis whose ranks are processes; its collectives run in the torch process group `group`, by
    default the one of all processes."""

    group: dist.ProcessGroup | None = None

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = SUM) -> Tensor:
        with self.waiting:
            dist.all_reduce(tensor, op, group=self.group)
        return tensor

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        return _begun(dist.all_reduce(tensor, group=self.group, async_op=True))

    def start_reduce(self, tensor: Tensor, owner: int) -> Pending:
        return _begun(dist.reduce(tensor, group=self.group, group_dst=owner, async_op=True))

    def broadcast(self, tensor: Tensor, owner: int = 0) -> None:
        with self.waiting:
            dist.broadcast(tensor, group=self.group, group_src=owner)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        # `dim` need not be the outermost, so the parts are joined after they have come.
        shards = [torch.empty_like(tensor) for _ in range(self.size)]
        with self.waiting:
            dist.all_gather(shards, tensor.contiguous(), group=self.group)
        return torch.cat(shards, dim=dim)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        part = tensor.new_empty(tensor.size(0) // self.size, *tensor.shape[1:])
        with self.waiting:
            reduce_scatter_single(part, tensor.contiguous(), group=self.group)
        return part

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def barrier(self) -> None:
        dist.barrier(self.group)

    def start_send(self, tensor: Tensor, peer: int) -> Pending:
        return _begun(dist.isend(tensor, group=self.group, group_dst=peer))

    def start_receive(self, tensor: Tensor, peer: int) -> Pending:
        return _begun(dist.irecv(tensor, group=self.group, group_src=peer))


def _begun(work: dist.Work | None) -> Pending:
    # torch returns None to a rank outside the group; such a rank holds a LoneAxis instead.
    assert work is not None  # this rank is in the group
    return work


@dataclass(frozen=True)
class ParallelMesh:
    """Mesh of ranks as one rank sees it: the layout, the rank's axes `tp`, `pp`, `dp`, `embedding`
    and `world`, which are groups of ranks to communicate with, its device, and in
    `sequence_parallel` if activations are divided along the sequence too."""

    layout: Layout
    tp: Axis
    pp: Axis
    dp: Axis
    embedding: Axis
    """Axis of the first and last pipeline rank, which share the tied embedding; of size 1 on the
    ranks between, and with one pipeline rank."""
    device: torch.device
    sequence_parallel: bool = False
    """True if activations outside tensor-parallel regions are divided along the sequence over the
    axis `tp`."""
    world: Axis = LoneAxis()
    """Axis of all ranks of the mesh, in the order of their global numbers; of size 1 by default."""

    @property
    def sequence_rank(self) -> int:
        """Index of the part of the sequence that this rank holds outside tensor-parallel regions; 0
        if the sequence is not divided."""
        return self.tp.rank if self.sequence_parallel else 0

    @property
    def waiting(self) -> Waiting:
        """The Waiting of this rank, which all axes of several ranks share: a context manager that
        adds the wall time inside its block, which is communication, to its attribute `seconds`. The
        axes enter it in their collectives of tensors; a caller enters it around the `wait` of
        communication that it started. On GPUs this time is little more than the time to queue the
        communication."""
        # Whoever builds the mesh gives all its axes one clock.
        return self.tp.waiting

    @property
    def is_first(self) -> bool:
        """True on global rank 0, which writes files and speaks to the user."""
        return self.tp.rank == 0 and self.pp.rank == 0 and self.dp.rank == 0

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Context manager for a block without collectives, which succeeds on every rank or on none:
        the first UserError or OSError in rank order is raised on all. Every rank enters and leaves
        the block, and leaving it is collective; any other exception is raised on its own rank
        alone, and the others wait."""
        # Without this, the ranks that succeeded would go on to the next collective and wait for the
        # failed one until the time-out, and its sentence would be lost among theirs.
        failure = None
        try:
            yield
        # Only failures that a user can mend are shared. A fault of the program keeps its own
        # traceback on its own rank.
        except (UserError, OSError) as error:
            failure = error
        for raised in self.world.gather_objects(failure):
            if raised is not None:
                raise raised


def serial_mesh(device: str | torch.device = "cpu") -> ParallelMesh:
    """Return the ParallelMesh of a single rank, which communicates with no other, on this device,
    by default the CPU."""
    axis = LoneAxis()
    return ParallelMesh(Layout(), axis, axis, axis, LoneAxis(), torch.device(device))
