"""Guards that watch the ranks: slow ranks, and replicas that drift apart."""

import time
from collections import Counter
from collections.abc import Sequence
from statistics import median

import torch

from engine.guard import Guard, Iteration
from engine.parallel.layout import Layout
from engine.parallel.mesh import ParallelMesh
from engine.parallel.sharding import TIED_EMBEDDING, ShardedParameter
from lineage.errors import Diverged

SHOWN = 8
"""Numbers that a sentence lists at most."""
WINDOW = 10
"""Iterations over which times are added up before they are compared."""
RATIO, LEAST_SECONDS = 1.5, 0.5
"""A slow rank takes at least this many times what the others take, and this much longer in a window."""
INTERVAL = 100
"""Iterations between comparisons of replicas; they are also compared before every checkpoint."""
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class SlowRankGuard(Guard):
    """Compares the time of each rank's own work, without communication, with that of the other ranks of its stage.

    It sees no difference on GPUs, where communication is not waited for, and with ZeRO stage 3.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._iterations, self._own, self._start = 0, 0.0, 0.0
        self._known: set[int] = set()

    def before(self, number: int) -> None:
        self._start = time.monotonic() - self._mesh.waiting.seconds

    def after(self, iteration: Iteration) -> str:
        self._own += time.monotonic() - self._mesh.waiting.seconds - self._start
        self._iterations += 1
        if self._mesh.layout.world_size == 1 or self._iterations % WINDOW:
            return ""
        seconds = self._mesh.world.gather_objects(self._own)
        self._own = 0.0
        slow = slow_ranks(seconds, self._mesh.layout)
        new, self._known = slow.keys() - self._known, set(slow)
        return "; ".join(
            f"warning: rank {rank} is slow and holds up the others: {1000 * seconds[rank] / WINDOW:.0f} ms an "
            f"iteration for its own work, the others take {1000 * slow[rank] / WINDOW:.0f}"
            for rank in sorted(new)
        )


def slow_ranks(seconds: Sequence[float], layout: Layout) -> dict[int, float]:
    """Each slow rank, with the median of the other ranks of its pipeline stage; `seconds` has every rank's window."""
    slow = {}
    together = layout.tp * layout.dp
    for rank, own in enumerate(seconds):
        first = rank // together * together
        others = [seconds[other] for other in range(first, first + together) if other != rank]
        if others and own > RATIO * median(others) and own - median(others) >= LEAST_SECONDS:
            slow[rank] = median(others)
    return slow


class ReplicaGuard(Guard):
    """Compares the parameters that several ranks hold whole: they must be the same bits on all of them.

    BLOOM's layer norms drifted apart between tensor-parallel ranks for weeks before anyone looked (bigscience, tr11
    chronicles, March 2022).
    """

    def __init__(self, parameters: Sequence[ShardedParameter], mesh: ParallelMesh) -> None:
        self._parameters, self._mesh = parameters, mesh

    def before(self, number: int) -> None:
        if number and number % INTERVAL == 0:
            self.before_checkpoint()

    def before_checkpoint(self) -> None:
        """Compare checksums. Raises Diverged, on every rank, naming tensor and ranks.

        Undivided parameters are compared over the tensor-parallel axis, all over the data-parallel axis, the tied
        embedding also between first and last stage.
        """
        mesh, layout = self._mesh, self._mesh.layout
        if layout.world_size == 1:
            return
        sums = {parameter.name: checksum(parameter.local.data) for parameter in self._parameters}
        undivided = [parameter.name for parameter in self._parameters if parameter.dim is None]
        tp, pp, dp = mesh.tp.rank, mesh.pp.rank, mesh.dp.rank
        shared = [
            ("tensor-parallel", mesh.tp, [layout.rank(n, pp, dp) for n in range(layout.tp)], undivided),
            ("data-parallel", mesh.dp, [layout.rank(tp, pp, n) for n in range(layout.dp)], list(sums)),
        ]
        if TIED_EMBEDDING in sums:
            ends = [layout.rank(tp, 0, dp), layout.rank(tp, layout.pp - 1, dp)]
            shared.append(("first and last pipeline", mesh.embedding, ends, [TIED_EMBEDDING]))
        said = ""
        for kind, axis, ranks, names in shared:
            own = torch.tensor([[sums[name] for name in names]], dtype=torch.int64, device=mesh.device)
            everyone = axis.all_gather(own, dim=0)
            differing = (everyone != everyone[0]).any(dim=0).nonzero().flatten().tolist()
            if differing and not said:
                more = f" and {len(differing) - 1} more tensors are" if len(differing) > 1 else " is"
                who = _describe_parting(ranks, everyone[:, differing[0]].tolist())
                said = f"{names[differing[0]]}{more} no longer the same on {kind} ranks: {who}; no checkpoint has it"
        if everywhere := [sentence for sentence in mesh.world.gather_objects(said) if sentence]:
            raise Diverged(everywhere[0])


def checksum(tensor: torch.Tensor) -> int:
    """Sum of the numbers' bit patterns, in 64 bits."""
    return int(tensor.contiguous().view(BITS[tensor.element_size()]).sum(dtype=torch.int64))


def _describe_parting(ranks: Sequence[int], sums: Sequence[int]) -> str:
    """The ranks that fewer others agree with, and those that they differ from."""
    usual, count = Counter(sums).most_common(1)[0]
    same = [rank for rank, value in zip(ranks, sums, strict=True) if value == usual]
    others = [rank for rank, value in zip(ranks, sums, strict=True) if value != usual]
    doubt = "" if count > len(others) else "; which of them is right cannot be told"
    return f"rank {joined(others)} differs from rank {joined(same)}{doubt}"


def joined(numbers: Sequence[int]) -> str:
    """The first numbers with commas, and how many more there are."""
    shown = ", ".join(str(number) for number in numbers[:SHOWN])
    return shown + (f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else "")
