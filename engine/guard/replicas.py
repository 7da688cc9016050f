"""Parameters that several ranks hold whole must be the same bits on all of them.

BLOOM's layer norms drifted apart between tensor-parallel ranks for weeks before anyone looked (bigscience, tr11
chronicles, March 2022).
"""

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist

from engine.guard import Guard
from engine.parallel.mesh import Axis, ParallelMesh
from engine.parallel.sharding import TIED_EMBEDDING, ShardedParameter
from lineage.errors import Diverged

INTERVAL = 100
"""Iterations between comparisons; a comparison also comes before every checkpoint."""
AXES = {"tensor": "tensor-parallel", "data": "data-parallel", "embedding": "first and last pipeline"}
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class ReplicaGuard(Guard):
    """Compares every INTERVAL iterations."""

    def __init__(self, parameters: Sequence[ShardedParameter], mesh: ParallelMesh) -> None:
        self._parameters, self._mesh = parameters, mesh

    def before(self, number: int) -> None:
        """Raises Diverged where replicas differ."""
        if number and number % INTERVAL == 0:
            self.before_checkpoint()

    def before_checkpoint(self) -> None:
        """Raises Diverged where replicas differ."""
        check_replicas(self._parameters, self._mesh)


def check_replicas(parameters: Sequence[ShardedParameter], mesh: ParallelMesh) -> None:
    """Compare checksums of what ranks should share. Every rank calls it.

    Undivided parameters are compared over the tensor-parallel axis, all over the data-parallel axis, the tied
    embedding also between first and last stage. Raises Diverged, on every rank, naming tensor and ranks.
    """
    if mesh.layout.world_size == 1:
        return
    sums = {parameter.name: checksum(parameter.local.data) for parameter in parameters}
    undivided = [parameter.name for parameter in parameters if parameter.dim is None]
    shared = [("tensor", mesh.tp, undivided), ("data", mesh.dp, list(sums))]
    if TIED_EMBEDDING in sums:
        shared.append(("embedding", mesh.embedding, [TIED_EMBEDDING]))
    equal = [_are_equal(axis, [sums[name] for name in names], mesh.device) for _, axis, names in shared]
    flag = torch.tensor(equal.count(False), device=mesh.device)
    dist.all_reduce(flag)
    if flag.item():
        raise Diverged(
            _name_first(mesh, mesh.gather_objects([(kind, {n: sums[n] for n in ns}) for kind, _, ns in shared]))
        )


def checksum(tensor: torch.Tensor) -> int:
    """Sum of the numbers' bit patterns, in 64 bits."""
    return int(tensor.contiguous().view(BITS[tensor.element_size()]).sum(dtype=torch.int64))


def _are_equal(axis: Axis, sums: list[int], device: torch.device) -> bool:
    """Whether every rank of the axis has the same sums: then the greatest of each is the least."""
    if axis.size == 1 or not sums:
        return True
    mine = torch.tensor(sums, dtype=torch.int64, device=device)
    ends = axis.all_reduce(torch.stack([mine, ~mine]), dist.ReduceOp.MAX)
    return bool((ends[0] == ~ends[1]).all())


def _name_first(mesh: ParallelMesh, differing: list[list[tuple[str, dict[str, int]]]]) -> str:
    """The first tensor that differs within a group of ranks, and the ranks that fewer others agree with.

    In the iterations after the first difference it spreads to other tensors; their number is given.
    """
    layout = mesh.layout
    groups: dict[tuple[str, int, int], dict[int, dict[str, int]]] = {}
    for rank, kinds in enumerate(differing):
        tp, pp, dp = layout.coordinates(rank)
        for kind, sums in kinds:
            key = {"tensor": (pp, dp), "data": (tp, pp), "embedding": (tp, dp)}[kind]
            groups.setdefault((kind, *key), {})[rank] = sums
    found_different: list[tuple[str, str, dict[int, int]]] = []
    for (kind, *_), group in groups.items():
        for name in next(iter(group.values())):
            values = {rank: own[name] for rank, own in group.items()}
            if len(set(values.values())) > 1:
                found_different.append((name, kind, values))
    name, kind, values = found_different[0]
    usual, count = Counter(values.values()).most_common(1)[0]
    same = [rank for rank, value in values.items() if value == usual]
    others = [rank for rank, value in values.items() if value != usual]
    tensors = len({name for name, _, _ in found_different}) - 1
    more = f" and {tensors} more tensors are" if tensors else " is"
    doubt = "" if count > len(others) else "; which of them is right cannot be told"
    return (
        f"{name}{more} no longer the same on {AXES[kind]} ranks: rank {_join(others)} differs from rank "
        f"{_join(same)}{doubt}; no checkpoint has it"
    )


def _join(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
