"""Faults planted on one rank of `mlm-train`."""

import math
import os
import resource
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d

import mlm_repro.engine.train
from mlm_repro.engine.checkpoint import shards
from mlm_repro.engine.inputs import TrainingInputs
from mlm_repro.engine.launch import local, mesh
from mlm_repro.engine.run import scores
from mlm_repro.engine.run.resolved import ResolvedRun
from mlm_repro.engine.step import TrainingStep
from mlm_repro.engine.trainer import Trainer

AT = 2
"""Iterations before the fault."""


def nan_in(name: str, dp: int) -> None:
    """A weight that is no number, on one data-parallel rank."""
    original = Trainer.iterate

    def iterate(self: Trainer, iteration: int) -> Any:
        for parameter in self.model.parameters:
            if iteration == AT and self.mesh.dp.rank == dp and parameter.name == name:
                with torch.no_grad():
                    parameter.local.view(-1)[0] = math.nan
        return original(self, iteration)

    Trainer.iterate = iterate  # type: ignore[method-assign]


def little_room(size: int) -> None:
    """So many bytes of address space are left to the last rank once its model is there."""
    original = TrainingStep.rehearse

    def rehearse_with_little_room(self: TrainingStep, *arguments: Any) -> Any:
        model = self.model
        if model.mesh.dp.rank == model.mesh.dp.size - 1:
            status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
            used = next(
                int(line.split()[1]) * 1024 for line in status if line.startswith("VmSize:")
            )
            resource.setrlimit(resource.RLIMIT_AS, (used + size, resource.RLIM_INFINITY))
        return original(self, *arguments)

    TrainingStep.rehearse = rehearse_with_little_room  # type: ignore[method-assign]


def other_config(key: str) -> None:
    """The last rank is given another value of a key of `train`."""
    original = mlm_repro.engine.train.train

    def train(run: ResolvedRun, root: Path) -> Any:
        if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
            changed = run.config.train.model_copy(update={key: 77})
            run = replace(run, config=run.config.model_copy(update={"train": changed}))
        return original(run, root)

    mlm_repro.engine.train.train = train


def slow_down(seconds: float) -> None:
    """Every iteration takes so much longer on all ranks but the first."""
    original = TrainingInputs.of

    def inputs(self: TrainingInputs, iteration: int) -> Any:
        if os.environ["RANK"] != "0":
            time.sleep(seconds)
        return original(self, iteration)

    TrainingInputs.of = inputs  # type: ignore[method-assign]


def wait_at(number: int) -> None:
    """Before the iteration with this number every rank waits for a stop."""
    original = Trainer.iterate

    def iterate(self: Trainer, iteration: int) -> Any:
        while iteration + 1 == number and not self.stop_requested:
            time.sleep(0.01)
        return original(self, iteration)

    Trainer.iterate = iterate  # type: ignore[method-assign]


def write_slowly(moments: str) -> None:
    """Each file of the checkpoints of iterations, `SECONDS@ITERATION,…`, takes so much longer."""
    original, seconds = (
        shards.write_shard,
        dict(reversed(moment.split("@")) for moment in moments.split(",")),
    )

    def write(path: Path, *arguments: Any) -> str:
        time.sleep(float(seconds.get(str(int(path.parent.name.split("_")[1].split(".")[0])), 0)))
        return original(path, *arguments)

    shards.write_shard = write


def time_out_after(seconds: float) -> None:
    """From the fault on ranks wait so long for each other, and have time to print their stacks."""
    original = Trainer.iterate

    def iterate(self: Trainer, iteration: int) -> Any:
        if iteration == AT:
            mesh.COLLECTIVE_TIMEOUT = timedelta(seconds=seconds)
            for group in distributed_c10d._world.pg_map:
                distributed_c10d._set_pg_timeout(mesh.COLLECTIVE_TIMEOUT, group)
        return original(self, iteration)

    Trainer.iterate = iterate  # type: ignore[method-assign]
    local.STACK_SECONDS = 10.0


def plant(fault: str) -> None:
    """Plant the fault `KIND=VALUE`."""
    kind, value = fault.split("=")
    if kind == "nan":
        name, dp = value.split("@")
        nan_in(name, int(dp))
    elif kind == "room_bytes":
        little_room(int(value))
    elif kind == "config":
        other_config(value)
    elif kind == "mlm_eval":
        scores.PROGRAM = Path(value)
    elif kind == "slow_seconds":
        slow_down(float(value))
    elif kind == "wait_at":
        wait_at(int(value))
    elif kind == "write_seconds":
        write_slowly(value)
    elif kind == "wait_seconds":
        time_out_after(float(value))
