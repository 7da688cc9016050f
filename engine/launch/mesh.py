"""From ranks that were started to the mesh that they are."""

import os
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from engine.launch import rendezvous
from engine.launch.rendezvous import join_ranks, launched_world_size
from engine.launch.shared_memory import share_memory
from engine.parallel.layout import Layout
from engine.parallel.mesh import Axis, ParallelMesh, Waiting, serial_mesh
from engine.torch_names import set_timeout
from lineage.errors import BadInput


def local_device() -> torch.device:
    """This rank's GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def build_mesh(layout: Layout, sequence_parallel: bool = False, invariant: int = 0) -> ParallelMesh:
    """Process groups for `layout` over the ranks that torchrun started (NCCL on GPUs, on CPUs gloo and,
    between ranks of one machine, shared memory). With `invariant` its tensor-parallel ranks stand for so many.

    Raises BadInput when the number of ranks differs from the layout's, RanksMissing when some do not come.
    """
    device = local_device()
    if layout.world_size != launched_world_size():
        raise BadInput(f"{layout} needs {layout.world_size} ranks but {launched_world_size()} were started")
    if invariant & (invariant - 1) or invariant % layout.tp:
        raise BadInput(f"tp = {layout.tp} does not divide {invariant} virtual ranks, or these are no power of 2")
    if layout.world_size == 1:
        return serial_mesh(device, invariant)
    join_ranks()
    mesh = init_device_mesh(device.type, (layout.pp, layout.dp, layout.tp), mesh_dim_names=("pp", "dp", "tp"))
    tp, pp, dp = layout.coordinates(dist.get_rank())
    waiting = Waiting()

    def axis(name: str, rank: int, virtual: int = 1) -> Axis:
        return replace(_axis(mesh, name, rank, waiting), virtual=virtual, in_order=invariant > 0)

    built = ParallelMesh(
        layout,
        tp=axis("tp", tp, invariant // layout.tp or 1),
        pp=axis("pp", pp),
        dp=axis("dp", dp),
        embedding=_embedding_axis(layout, tp, pp, dp, waiting, device.type),
        device=device,
        sequence_parallel=sequence_parallel and layout.tp > 1,
    )
    built.barrier()  # a rank that leaves now finds every connection made
    return built


def _axis(mesh: DeviceMesh, name: str, rank: int, waiting: Waiting) -> Axis:
    group = mesh.get_group(name)
    set_timeout(rendezvous.COLLECTIVE_TIMEOUT, group)  # torch would wait half an hour
    shared_memory = None
    if mesh.device_type == "cpu" and group.size() > 1:
        shared_memory = share_memory(group, rendezvous.COLLECTIVE_TIMEOUT)
    return Axis(group.size(), rank, group, shared_memory, waiting)


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
                shared_memory = share_memory(group, rendezvous.COLLECTIVE_TIMEOUT) if device_type == "cpu" else None
                mine = Axis(2, 0 if pp == 0 else 1, group, shared_memory, waiting)
    return mine
