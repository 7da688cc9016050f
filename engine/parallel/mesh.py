"""The mesh of ranks, an object that is passed in; there is no module-level parallel state."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

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

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce in place over the axis."""
        if self.size > 1:
            with self.waiting:
                dist.all_reduce(tensor, op, group=self.shared_memory or self.group)
        return tensor

    def reduce(self, tensor: torch.Tensor, owner: int = 0) -> None:
        """Add up on one rank of the axis, in place; what the others hold afterwards is not defined."""
        if self.size > 1:
            with self.waiting:
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


def serial_mesh(device: str | torch.device = "cpu") -> ParallelMesh:
    """The mesh of one rank."""
    return ParallelMesh(Layout(), Axis(), Axis(), Axis(), Axis(), torch.device(device))
