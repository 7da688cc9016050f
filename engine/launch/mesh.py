"""Builds the mesh of the ranks that were started."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from engine.launch import rendezvous
from engine.launch.rendezvous import join_ranks, launched_world_size, local_rank
from engine.launch.threads import current_rank, thread_mesh
from engine.parallel.layout import Layout
from engine.parallel.mesh import Axis, GroupAxis, ParallelMesh, Waiting, serial_mesh
from engine.torch_names import set_timeout
from lineage.errors import BadInput


def local_device() -> torch.device:
    """This rank's GPU; the CPU if there is none, and for ranks that are threads."""
    if current_rank() or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank())


def build_mesh(layout: Layout, sequence_parallel: bool = False) -> ParallelMesh:
    """The mesh of `layout` over the threads or processes that were started. Processes speak through NCCL on GPUs,
    through gloo on CPUs. Raises BadInput when the number of ranks differs from the layout's, RanksMissing when some do
    not come."""
    if layout.world_size != launched_world_size():
        raise BadInput(f"{layout} needs {layout.world_size} ranks but {launched_world_size()} were started")
    if here := current_rank():
        return thread_mesh(here, layout, sequence_parallel)
    device = local_device()
    if layout.world_size == 1:
        return serial_mesh(device)
    join_ranks()
    groups = init_device_mesh(device.type, (layout.pp, layout.dp, layout.tp), mesh_dim_names=("pp", "dp", "tp"))
    tp, pp, dp = layout.coordinates(dist.get_rank())
    waiting = Waiting()

    def axis(name: str, rank: int) -> Axis:
        group = groups.get_group(name)
        set_timeout(rendezvous.COLLECTIVE_TIMEOUT, group)  # torch would wait half an hour
        return GroupAxis(group.size(), rank, waiting, group) if group.size() > 1 else Axis(waiting=waiting)

    mesh = ParallelMesh(
        layout, tp=axis("tp", tp), pp=axis("pp", pp), dp=axis("dp", dp),
        embedding=_embedding_axis(layout, tp, pp, dp, waiting), device=device,
        sequence_parallel=sequence_parallel and layout.tp > 1,
        world=GroupAxis(layout.world_size, dist.get_rank(), waiting, dist.group.WORLD),
    )  # fmt: skip
    mesh.world.barrier()  # a rank that leaves now finds every connection made
    return mesh


def _embedding_axis(layout: Layout, tp: int, pp: int, dp: int, waiting: Waiting) -> Axis:
    """Groups of first and last pipeline ranks; every rank makes all of them, as process groups require."""
    mine = Axis()
    if layout.pp == 1:
        return mine
    for other_dp in range(layout.dp):
        for other_tp in range(layout.tp):
            ends = [layout.rank(other_tp, 0, other_dp), layout.rank(other_tp, layout.pp - 1, other_dp)]
            group = dist.new_group(ends, timeout=rendezvous.COLLECTIVE_TIMEOUT)
            if (other_tp, other_dp) == (tp, dp) and pp in (0, layout.pp - 1):
                mine = GroupAxis(2, 0 if pp == 0 else 1, waiting, group)
    return mine
