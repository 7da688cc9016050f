"""The mesh of ranks, an object that is passed in; there is no module-level parallel state."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from engine.parallel.layout import Layout
from engine.torch_names import reduce_scatter_single
from lineage.errors import UserError


class Waiting:
    """Seconds that this rank has spent in communication, which on CPUs is mostly waiting for the others."""

    def __init__(self) -> None:
        self.seconds, self._start = 0.0, 0.0

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, *failure: object) -> None:
        self.seconds += time.monotonic() - self._start


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh as this rank sees it. Collectives over an axis of size 1 do nothing."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    shared_memory: dist.ProcessGroup | None = None
    """The same ranks on one machine without GPUs: what they wait for goes through memory."""
    waiting: Waiting = field(default_factory=Waiting, compare=False)
    virtual: int = 1
    """Virtual ranks that each rank of the axis stands for."""
    in_order: bool = False
    """Whether sums over the axis are taken in one fixed binary tree over its ranks."""

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce in place over the axis."""
        if self.size > 1 and self.in_order and op == dist.ReduceOp.SUM and not self.shared_memory:
            flat = F.pad(tensor.reshape(-1), (0, -tensor.numel() % self.size))
            whole = self.all_gather(self.reduce_scatter(flat), dim=0)
            tensor.copy_(whole[: tensor.numel()].view_as(tensor))
        elif self.size > 1:
            with self.waiting:
                dist.all_reduce(tensor, op, group=self.shared_memory or self.group)
        return tensor

    def reduce(self, tensor: torch.Tensor, owner: int = 0) -> None:
        """Add up on one rank of the axis, in place; what the others hold afterwards is not defined."""
        if self.size > 1:
            with self.waiting:
                if self.in_order and not self.shared_memory:
                    parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == owner else None
                    dist.gather(tensor, parts, group=self.group, group_dst=owner)
                    if parts:
                        tensor.copy_(sum_in_tree(parts))
                else:
                    dist.reduce(tensor, group=self.shared_memory or self.group, group_dst=owner)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give every rank of the axis the first one's values, in place."""
        if self.size > 1:
            with self.waiting:
                dist.broadcast(tensor, group=self.group, group_src=0)

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The shards of every rank of the axis joined along `dim`."""
        if self.size == 1:
            return tensor
        shards = [torch.empty_like(tensor) for _ in range(self.size)]
        with self.waiting:
            dist.all_gather(shards, tensor.contiguous(), group=self.shared_memory or self.group)
        return torch.cat(shards, dim=dim)

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part, along dim 0, of the sum over the axis."""
        if self.size == 1:
            return tensor
        part = tensor.new_empty(tensor.size(0) // self.size, *tensor.shape[1:])
        with self.waiting:
            if self.in_order and not self.shared_memory:
                theirs = torch.empty_like(tensor)
                dist.all_to_all_single(theirs, tensor.contiguous(), group=self.group)
                return sum_in_tree(theirs.chunk(self.size))
            reduce_scatter_single(part, tensor.contiguous(), group=self.shared_memory or self.group)
        return part


@dataclass(frozen=True)
class ParallelMesh:
    """This rank's place in a layout, its process groups and its device."""

    layout: Layout
    tp: Axis
    pp: Axis
    dp: Axis
    embedding: Axis
    """First and last pipeline rank, which share the tied embedding; of size 1 on the ranks between."""
    device: torch.device
    sequence_parallel: bool = False
    """Whether activations outside tensor-parallel regions are divided along the sequence over the tp axis."""

    @property
    def in_order(self) -> bool:
        """Whether everything is computed in virtual tensor-parallel ranks, so that the layout changes no bit."""
        return self.tp.in_order

    @property
    def row_blocks(self) -> int:
        """How many blocks of a sequence's rows this rank computes one by one outside tensor-parallel regions."""
        return self.tp.virtual * (1 if self.sequence_parallel else self.tp.size)

    @property
    def row_axis(self) -> Axis | None:
        """Over which gradients of undivided parameters are added up as they arise; None where they need not be."""
        return self.tp if self.in_order and self.sequence_parallel else None

    @property
    def sequence_rank(self) -> int:
        """Which part of the sequence this rank holds outside tensor-parallel regions."""
        return self.tp.rank if self.sequence_parallel else 0

    @property
    def waiting(self) -> Waiting:
        """This rank's, over all axes."""
        return self.tp.waiting

    @property
    def is_first(self) -> bool:
        """Whether this is global rank 0, which writes files and speaks to the user."""
        return self.tp.rank == 0 and self.pp.rank == 0 and self.dp.rank == 0

    def pipeline_peer(self, pp_rank: int) -> int:
        """Global rank of this rank's counterpart at another pipeline rank."""
        return self.layout.rank(self.tp.rank, pp_rank, self.dp.rank)

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.layout.world_size > 1:
            dist.barrier()

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """A block without collectives that succeeds on every rank or on none: one rank's failure is raised on all."""
        failure: Exception | None = None
        try:
            yield
        except (UserError, OSError) as error:
            failure = error
        for raised in self.gather_objects(failure):
            if raised is not None:
                raise raised

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value in rank order, on every rank."""
        if self.layout.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.layout.world_size
        dist.all_gather_object(values, value)
        return values


def serial_mesh(device: str | torch.device = "cpu", invariant: int = 0) -> ParallelMesh:
    """The mesh of one rank; it stands for `invariant` virtual tensor-parallel ranks, where these are given."""
    axis = Axis(in_order=invariant > 0)
    return ParallelMesh(Layout(), replace(axis, virtual=invariant or 1), axis, axis, Axis(), torch.device(device))


def sum_in_tree(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of neighbours, then of neighbouring sums, and so on: one order for any division of the parts."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
