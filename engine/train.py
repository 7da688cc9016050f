"""A training run from beginning to end: ranks join, agree on the work, take its directory and train."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from engine.config import RunConfig
from engine.data.dataset import DatasetFacts
from engine.guard.memory import explaining_out_of_memory
from engine.guard.products import check_products
from engine.guard.ranks import InputGuard
from engine.launch.mesh import build_mesh
from engine.launch.rendezvous import check_agreement, join_ranks, launched_world_size, telling_of_lost_ranks
from engine.optim.precision import DTYPES
from engine.parallel.layout import layout_of
from engine.parallel.mesh import ParallelMesh
from engine.run.directory import begin_run
from engine.run.estimate import describe_disk, describe_training, iterations_done
from engine.run.loggers import open_loggers
from engine.trainer import Trainer
from lineage.lock import locked
from lineage.progress import announce
from lineage.run import RunDirectory


def train(config: RunConfig, root: Path, until: int | None = None) -> RunDirectory:
    """Train `config` in its run directory below `root`, going on from the newest checkpoint there.

    A complete run is returned as it is. Raises Interrupted after SIGTERM, Ctrl-C or iteration `until`, with a
    checkpoint written.
    """
    with begun_on_ranks(config, root) as (config, dataset, run, mesh), run_locked(run, mesh):
        if not run.is_complete:
            if mesh.is_first:
                cost = describe_training(config, mesh.layout.world_size, iterations_done(run.path))
                announce(cost, describe_disk(config), str(run.path))
            with mesh.all_or_none():
                unchanged = InputGuard(dataset, mesh)
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    dataset.check()
                if config.train.invariant:
                    check_products(config.model, config.train.invariant, DTYPES[config.train.precision], mesh.device)
                loggers = open_loggers(config.record.loggers if mesh.is_first else ())
            with explaining_out_of_memory(config, mesh, "before the first iteration"):
                trainer = Trainer(config, run, dataset, mesh)
                trainer.guards.add(unchanged)
            with explaining_out_of_memory(config, mesh, "while training"):
                trainer.run_to_end(loggers, until)
        elif mesh.is_first:
            run.link()
    return run


@contextmanager
def begun_on_ranks(
    config: RunConfig, root: Path
) -> Iterator[tuple[RunConfig, DatasetFacts, RunDirectory, ParallelMesh]]:
    """The run as every started rank has agreed on it, and the mesh that they are.

    Raises BadInput if ranks were given different work, RanksMissing if one does not come or is lost.
    """
    join_ranks()
    with telling_of_lost_ranks():
        check_agreement(config.model_dump(mode="json"))
        config, dataset, run = begin_run(config, root)
        layout = layout_of(config, launched_world_size())
        if layout.world_size > 1 or config.train.invariant:
            torch.set_num_threads(1)  # several would divide a product or an update at other places
        mesh = build_mesh(layout, config.parallel.sequence_parallel, config.train.invariant)
        mesh.barrier()
        yield config, dataset, run, mesh


@contextmanager
def run_locked(run: RunDirectory, mesh: ParallelMesh) -> Iterator[None]:
    """Keep other commands from training a run not at rest. Raises BadInput, on every rank, if one does already."""
    with ExitStack() as held:
        with mesh.all_or_none():
            if mesh.is_first and not run.is_at_rest:
                held.enter_context(locked(run.path))
        yield
