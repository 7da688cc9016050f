"""Guards that watch the ranks: slow ranks, replicas that drift apart, datasets that change on a node."""

import time
from collections import Counter
from collections.abc import Sequence
from statistics import median

import torch

from engine.data.dataset import DatasetFacts
from engine.guard import Guard, Iteration
from engine.launch.rendezvous import local_rank
from engine.parallel.layout import Layout
from engine.parallel.mesh import ParallelMesh
from engine.parallel.sharding import TIED_EMBEDDING, ShardedParameter
from lineage.errors import Diverged
from lineage.verified import touches_of

SHOWN = 8
"""Numbers that a sentence lists at most."""
WINDOW = 10
"""Iterations over which times are added up before they are compared."""
RATIO, LEAST_SECONDS = 1.5, 0.5
"""A slow rank takes at least this many times what the others take, and this much longer in a window."""
INTERVAL = 100
"""Iterations between comparisons of replicas; they are also compared before every checkpoint."""
AXES = {"tensor": "tensor-parallel", "data": "data-parallel", "embedding": "first and last pipeline"}
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
        """Start the clock."""
        self._start = time.monotonic() - self._mesh.waiting.seconds

    def after(self, iteration: Iteration) -> str:
        """After every window, a warning about ranks that have become slow."""
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
        """Raises Diverged where replicas differ."""
        if number and number % INTERVAL == 0:
            self.before_checkpoint()

    def before_checkpoint(self) -> None:
        """Compare checksums. Raises Diverged, on every rank, naming tensor and ranks.

        Undivided parameters are compared over the tensor-parallel axis, all over the data-parallel axis, the tied
        embedding also between first and last stage.
        """
        mesh = self._mesh
        if mesh.layout.world_size == 1:
            return
        sums = {parameter.name: checksum(parameter.local.data) for parameter in self._parameters}
        undivided = [parameter.name for parameter in self._parameters if parameter.dim is None]
        shared = [("tensor", mesh.tp, undivided), ("data", mesh.dp, list(sums))]
        if TIED_EMBEDDING in sums:
            shared.append(("embedding", mesh.embedding, [TIED_EMBEDDING]))
        differ = False
        for _, axis, names in shared:
            own = torch.tensor([[sums[name] for name in names]], dtype=torch.int64, device=mesh.device)
            everyone = axis.all_gather(own, dim=0)
            differ |= bool((everyone != everyone[0]).any())
        if any(mesh.world.gather_objects(differ)):
            reports = mesh.world.gather_objects([(kind, {n: sums[n] for n in names}) for kind, _, names in shared])
            raise Diverged(_describe_first(mesh.layout, reports))


def checksum(tensor: torch.Tensor) -> int:
    """Sum of the numbers' bit patterns, in 64 bits."""
    return int(tensor.contiguous().view(BITS[tensor.element_size()]).sum(dtype=torch.int64))


def _describe_first(layout: Layout, reports: list[list[tuple[str, dict[str, int]]]]) -> str:
    """The first tensor that differs within a group of ranks, and the ranks that fewer others agree with.

    A difference spreads to other tensors in the next iterations; the sentence gives their number.
    """
    groups: dict[tuple[str, int, int], dict[int, dict[str, int]]] = {}
    for rank, kinds in enumerate(reports):
        tp, pp, dp = layout.coordinates(rank)
        for kind, sums in kinds:
            key = {"tensor": (pp, dp), "data": (tp, pp), "embedding": (tp, dp)}[kind]
            groups.setdefault((kind, *key), {})[rank] = sums
    differing = [
        (name, kind, values)
        for (kind, *_), group in groups.items()
        for name in next(iter(group.values()))
        if len(set((values := {rank: sums[name] for rank, sums in group.items()}).values())) > 1
    ]
    name, kind, values = differing[0]
    usual, count = Counter(values.values()).most_common(1)[0]
    same = [rank for rank, value in values.items() if value == usual]
    others = [rank for rank, value in values.items() if value != usual]
    tensors = len({name for name, _, _ in differing}) - 1
    more = f" and {tensors} more tensors are" if tensors else " is"
    doubt = "" if count > len(others) else "; which of them is right cannot be told"
    return (
        f"{name}{more} no longer the same on {AXES[kind]} ranks: rank {joined(others)} differs from rank "
        f"{joined(same)}{doubt}; no checkpoint has it"
    )


class InputGuard(Guard):
    """Looks on each node if a file of the datasets was touched, and reads the datasets again if one was."""

    def __init__(self, dataset: DatasetFacts, mesh: ParallelMesh) -> None:
        self._dataset, self._mesh = dataset, mesh
        self._touches = self._look()

    def before_checkpoint(self) -> None:
        """Raises IntegrityFailure, on every rank, where a dataset has changed."""
        with self._mesh.all_or_none():
            if local_rank() == 0 and (touches := self._look()) != self._touches:
                self._dataset.check()
                self._touches = touches

    def _look(self) -> list[dict[str, list[int]]]:
        return [touches_of(directory) for directory in self._dataset.directories]


def joined(numbers: Sequence[int]) -> str:
    """The first numbers with commas, and how many more there are."""
    shown = ", ".join(str(number) for number in numbers[:SHOWN])
    return shown + (f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else "")
