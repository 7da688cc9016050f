"""Ranks that take longer for their own work than those that do the same, and so hold up all."""

import time
from collections.abc import Sequence
from statistics import median

import torch

from engine.guard import Guard, Iteration
from engine.parallel.layout import Layout
from engine.parallel.mesh import ParallelMesh

WINDOW = 10
"""Iterations over which times are added up before they are compared."""
RATIO, LEAST_SECONDS = 1.5, 0.5
"""A slow rank takes more than so many times what the others take, and so much longer in a window."""


class SlowRankGuard(Guard):
    """Compares what the work of each rank takes, communication left out, with that of the others of its stage.

    On GPUs, which are not waited for in communication, and with ZeRO stage 3 the times of all are alike.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._iterations, self._own, self._start = 0, 0.0, 0.0
        self._known: set[int] = set()

    def before(self, number: int) -> None:
        """Start the clock."""
        self._start = time.monotonic() - self._mesh.waiting.seconds

    def after(self, iteration: Iteration) -> str:
        """A warning about ranks that have become slow, after every window."""
        self._own += time.monotonic() - self._mesh.waiting.seconds - self._start
        self._iterations += 1
        if self._mesh.layout.world_size == 1 or self._iterations % WINDOW:
            return ""
        seconds = torch.tensor([self._own], dtype=torch.float64, device=self._mesh.device)
        for axis in (self._mesh.tp, self._mesh.dp, self._mesh.pp):
            seconds = axis.all_gather(seconds, dim=0)
        self._own = 0.0
        slow = slow_ranks(seconds.tolist(), self._mesh.layout)
        new, self._known = slow.keys() - self._known, set(slow)
        return "; ".join(
            f"warning: rank {rank} is slow and holds up the others: {1000 * seconds[rank] / WINDOW:.0f} ms an "
            f"iteration for its own work, theirs take {1000 * slow[rank] / WINDOW:.0f}"
            for rank in sorted(new)
        )


def slow_ranks(seconds: Sequence[float], layout: Layout) -> dict[int, float]:
    """Of each rank that is slow, what the others of its pipeline stage take; from every rank's seconds in a window."""
    slow = {}
    together = layout.tp * layout.dp
    for rank, own in enumerate(seconds):
        first = rank // together * together
        others = [seconds[other] for other in range(first, first + together) if other != rank]
        if others and own > RATIO * median(others) and own - median(others) >= LEAST_SECONDS:
            slow[rank] = median(others)
    return slow
