"""Going on from the newest checkpoint that is in order."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from engine.checkpoint.checkpoint import TrainingState, complete_checkpoints, load_checkpoint
from engine.checkpoint.probe import Probe, describe_computation
from engine.optim.flat import FlatOptimizer
from engine.parallel.mesh import ParallelMesh
from engine.parallel.sharding import ShardedParameter
from lineage.errors import IntegrityFailure

ProbeLoss = Callable[[Probe], float]
"""The loss of the model as it is now on a probe's samples; every rank calls it and has the result."""


def resume(
    run: Path, parameters: list[ShardedParameter], optimizer: FlatOptimizer, probe_loss: ProbeLoss
) -> TrainingState:
    """The state of the newest checkpoint of `run` that can be trusted, loaded; iteration 0 if there is none yet.

    Digests, statistics and probe loss are compared. A checkpoint that fails is set aside under a hidden name, with a
    warning, and the one before it is taken. Raises IntegrityFailure if there are checkpoints and none is in order.
    Every rank calls it.
    """
    mesh = optimizer.mesh
    damaged: list[tuple[Path, IntegrityFailure]] = []
    for path in reversed(complete_checkpoints(run)):
        try:
            state, probe = load_checkpoint(path, parameters, optimizer)
            if probe:
                check_probe(path, probe, probe_loss, mesh)
        except IntegrityFailure as error:
            damaged.append((path, error))
            continue
        if mesh.is_first:
            for bad, failure in damaged:
                _set_aside(bad, failure, path)
        mesh.barrier()
        return state
    if damaged:
        raise damaged[0][1]
    return TrainingState()


def check_probe(path: Path, probe: Probe, probe_loss: ProbeLoss, mesh: ParallelMesh) -> None:
    """Compare the probe's loss on every rank. Raises IntegrityFailure, on every rank, where one's is another."""
    loss = probe_loss(probe)
    with mesh.all_or_none():
        warning = probe.compare(loss, path, describe_computation(mesh.layout, mesh.device))
    if warning and mesh.is_first:
        print(f"warning: {path.name}: {warning}", file=sys.stderr)


def _set_aside(bad: Path, failure: IntegrityFailure, good: Path) -> None:
    aside = bad.with_name(f".{bad.name}.damaged")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(bad, aside)
    print(f"warning: {failure}; it is kept as {aside.name}, and training goes on from {good.name}", file=sys.stderr)
