"""The guards of a training run: the one place where the trainer meets what watches it."""

from collections.abc import Iterator

import torch

from engine.config import RunConfig
from engine.guard import Guard, Iteration
from engine.guard.diagnosis import FiniteGuard
from engine.guard.memory import MemoryGuard, PeakMemory
from engine.guard.noise_scale import NoiseScaleGuard
from engine.guard.out_of_memory import explaining_out_of_memory
from engine.guard.replicas import ReplicaGuard
from engine.guard.slow_ranks import SlowRankGuard
from engine.guard.spikes import RecentIterations, SpikeGuard
from engine.guard.timeline import TimelineGuard
from engine.run.directory import read_steps
from engine.step import TrainingStep
from lineage.run import RunDirectory

__all__ = ["Guards", "Iteration", "RecentIterations", "explaining_out_of_memory"]


class Guards:
    """Every guard of a run, in the order in which they are asked."""

    def __init__(self, device: torch.device) -> None:
        """Memory is counted from here on."""
        self.memory, self.recent = PeakMemory(device), RecentIterations()
        self._guards: list[Guard] = []

    def watch(self, config: RunConfig, run: RunDirectory, step: TrainingStep, recent: RecentIterations) -> None:
        """Watch this run's step; `recent` is what its checkpoint remembers of the last iterations."""
        train, mesh = config.train, step.mesh
        self.recent = recent
        self._guards = [
            SlowRankGuard(mesh),
            SpikeGuard(recent, train.skip_spikes),
            FiniteGuard(step),
            MemoryGuard(self.memory),
            TimelineGuard(run.path, config, step),
            ReplicaGuard(step.model.parameters, step.model.storage_mesh),
        ]
        if config.record.noise_scale and mesh.dp.size > 1:
            self._guards.append(NoiseScaleGuard(read_steps(run.path), mesh.dp.size))

    def add(self, guard: Guard) -> None:
        """Have one more guard asked before the others."""
        self._guards.insert(0, guard)

    def __iter__(self) -> Iterator[Guard]:
        return iter(self._guards)
