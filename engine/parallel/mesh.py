"""The mesh of ranks, an object that is passed in; there is no module-level parallel state."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from engine.parallel import rendezvous
from engine.parallel.layout import Layout
from engine.parallel.rendezvous import join_ranks, launched_world_size
from engine.parallel.shared_memory import share_memory
from engine.parallel.waiting import Waiting
from engine.torch_names import reduce_scatter_single, set_timeout
from lineage.errors import BadInput, UserError


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh as this rank sees it. Collectives over an axis of size 1 do nothing."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    near: dist.ProcessGroup | None = None
    """The same ranks on one machine without GPUs: what they wait for goes through memory."""
    waiting: Waiting = field(default_factory=Waiting, compare=False)

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce in place over the axis."""
        if self.size > 1:
            with self.waiting:
                dist.all_reduce(tensor, op, group=self.near or self.group)
        return tensor

    def reduce(self, tensor: torch.Tensor) -> None:
        """Add up on the axis' first rank, in place; what the others hold afterwards is not defined."""
        if self.size > 1:
            with self.waiting:
                dist.reduce(tensor, group=self.group, group_dst=0)

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
            dist.all_gather(shards, tensor.contiguous(), group=self.near or self.group)
        return torch.cat(shards, dim=dim)

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part, along dim 0, of the sum over the axis."""
        if self.size == 1:
            return tensor
        part = tensor.new_empty(tensor.size(0) // self.size, *tensor.shape[1:])
        with self.waiting:
            reduce_scatter_single(part, tensor.contiguous(), group=self.near or self.group)
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
    def together(self) -> Iterator[None]:
        """A block without collectives that succeeds on every rank or on none: one rank's failure is raised on all."""
        failure: Exception | None = None
        try:
            yield
        except (UserError, OSError) as error:
            failure = error
        for found in self.gather_objects(failure):
            if found is not None:
                raise found

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


def local_device() -> torch.device:
    """This rank's GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def build_mesh(layout: Layout, sequence_parallel: bool = False) -> ParallelMesh:
    """Process groups for `layout` over the ranks that torchrun started (NCCL on GPUs, on CPUs gloo and,
    between ranks of one machine, shared memory).

    Raises BadInput when the number of ranks differs from the layout's, RanksMissing when some do not come.
    """
    device = local_device()
    if layout.world_size != launched_world_size():
        raise BadInput(f"{layout} needs {layout.world_size} ranks but {launched_world_size()} were started")
    if layout.world_size == 1:
        return serial_mesh(device)
    join_ranks()
    mesh = init_device_mesh(device.type, (layout.pp, layout.dp, layout.tp), mesh_dim_names=("pp", "dp", "tp"))
    tp, pp, dp = layout.coordinates(dist.get_rank())
    waiting = Waiting()
    built = ParallelMesh(
        layout,
        tp=_axis(mesh, "tp", tp, waiting),
        pp=_axis(mesh, "pp", pp, waiting),
        dp=_axis(mesh, "dp", dp, waiting),
        embedding=_embedding_axis(layout, tp, pp, dp, waiting, device.type),
        device=device,
        sequence_parallel=sequence_parallel and layout.tp > 1,
    )
    built.barrier()  # a rank that leaves now finds every connection made
    return built


def _axis(mesh: DeviceMesh, name: str, rank: int, waiting: Waiting) -> Axis:
    group = mesh.get_group(name)
    set_timeout(rendezvous.COLLECTIVE_TIMEOUT, group)  # torch would wait half an hour
    near = None
    if mesh.device_type == "cpu" and group.size() > 1:
        near = share_memory(group, rendezvous.COLLECTIVE_TIMEOUT)
    return Axis(group.size(), rank, group, near, waiting)


def _embedding_axis(layout: Layout, tp: int, pp: int, dp: int, waiting: Waiting, device_type: str) -> Axis:
    """Groups of first and last pipeline ranks; every rank makes all of them, as process groups require."""
    if layout.pp == 1:
        return Axis()
    mine = Axis()
    for other_dp in range(layout.dp):
        for other_tp in range(layout.tp):
            ends = [layout.rank(other_tp, 0, other_dp), layout.rank(other_tp, layout.pp - 1, other_dp)]
            group = dist.new_group(ends, timeout=rendezvous.COLLECTIVE_TIMEOUT)
            if (other_tp, other_dp) == (tp, dp) and pp in (0, layout.pp - 1):
                near = share_memory(group, rendezvous.COLLECTIVE_TIMEOUT) if device_type == "cpu" else None
                mine = Axis(2, 0 if pp == 0 else 1, group, near, waiting)
    return mine
