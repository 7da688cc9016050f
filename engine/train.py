"""A training run from beginning to end: ranks join, agree on the work, take its directory and
train."""

import gc
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from mlm_repro.engine.guard.memory import explaining_out_of_memory
from mlm_repro.engine.launch.mesh import (
    build_mesh,
    check_agreement,
    join_ranks,
    local_rank,
    telling_of_lost_ranks,
)
from mlm_repro.engine.parallel.mesh import ParallelMesh
from mlm_repro.engine.run.loggers import open_loggers
from mlm_repro.engine.run.resolved import ResolvedRun
from mlm_repro.engine.run.scores import check_protocols
from mlm_repro.engine.trainer import Trainer
from mlm_repro.lineage.chain import complete_checkpoints, iteration_of
from mlm_repro.lineage.lock import locked
from mlm_repro.lineage.progress import announce, format_bytes
from mlm_repro.lineage.run import RunDirectory
from mlm_repro.lineage.variables import launched_ranks

FP16_ON_A_PROCESSOR = (
    "fp16 takes about eleven times as long as fp32 or bf16 on a processor: --set"
    " train.precision=fp32"
)


def train(run: ResolvedRun, root: Path, until: int | None = None) -> RunDirectory:
    """Train a ResolvedRun to its end, in its directory below `root` or the one where it was begun,
    from the newest checkpoint there; return the directory, a RunDirectory. Every rank calls it. The
    first one prints cost, notes and warnings to standard error.

    A complete run is not trained; the link with its name is made to lead to it. Raises Interrupted
    after SIGTERM, Ctrl-C or iteration `until`, if iterations are left, with a checkpoint written,
    and if a checkpoint cannot be written; OutOfMemory if a rank lacks memory; Diverged as the
    guards and validations do; IntegrityFailure for a damaged dataset or checkpoint; BadInput for a
    dataset or checkpoint that does not fit, or if a logger's library is missing or, on launched
    ranks, a protocol of `record.evaluate` cannot be run; and the errors of `begun_on_ranks`.
    """
    config = run.config
    with begun_on_ranks(run, root) as (directory, mesh):
        if not directory.is_complete:
            if mesh.is_first:
                begun_at = config.train.continues.iteration if config.train.continues else 0
                done = max(
                    map(iteration_of, complete_checkpoints(directory.path)), default=begun_at
                )
                other = directory.other_code
                directory.note_attempt(
                    done, config.parallel.model_dump(mode="json"), mesh.layout.world_size
                )
                directory.link(yields=True)
                # One more checkpoint is on the disk while it is written than is kept afterwards.
                disk = (config.train.keep_checkpoints + 1) * run.checkpoint_bytes
                announce(
                    run.describe_work(done),
                    f"up to {format_bytes(disk)} of checkpoints",
                    str(directory.path),
                )
                if other:
                    print(f"note: {other}", file=sys.stderr)
                if config.train.precision.startswith("fp16") and mesh.device.type == "cpu":
                    print(f"warning: {FP16_ON_A_PROCESSOR}", file=sys.stderr)
            with mesh.all_or_none():
                if local_rank() == 0:
                    run.data.check()
                # A plain process has asked already, before it began the run.
                if mesh.is_first and launched_ranks():
                    check_protocols(config.record.evaluate)
                loggers = open_loggers(config.record.loggers if mesh.is_first else ())
            with explaining_out_of_memory(run, mesh, "before the first iteration"):
                trainer = Trainer(run, directory, mesh)
                trainer.prepare()
            gc.collect()
            # Lasting objects are frozen: while one rank's collector goes through them, the other
            # ranks wait.
            gc.freeze()
            with explaining_out_of_memory(run, mesh, "while training"):
                trainer.run_to_end(loggers, until)
        elif mesh.is_first:
            directory.link()
    return directory


@contextmanager
def begun_on_ranks(run: ResolvedRun, root: Path) -> Iterator[tuple[RunDirectory, ParallelMesh]]:
    """Context manager: yield a pair of the run's directory, a RunDirectory begun below `root` if it
    is new, and the ParallelMesh of the started ranks. Every rank enters it. No other command trains
    in the directory meanwhile; a complete run is not locked. With several ranks torch uses one
    thread on each, and keeps to it after the block.

    Raises BadInput, on every rank, if ranks were given different work, if the run's layout needs
    another number of ranks, or if another command trains the run already; RanksMissing if a rank
    does not come, RankLost if one ends or hangs, in the block too, and the errors of
    `ResolvedRun.begin`, such as BadInput for a directory that cannot be made.
    """
    join_ranks()
    with telling_of_lost_ranks(), ExitStack() as stack:
        check_agreement(run.config.model_dump(mode="json"))
        directory = run.begin(root)
        layout = run.layout
        if layout.world_size > 1:
            torch.set_num_threads(1)
        mesh = build_mesh(layout, run.config.parallel.sequence_parallel)
        with mesh.all_or_none():
            if mesh.is_first and not directory.is_at_rest:
                stack.enter_context(locked(directory.path))
        yield directory, mesh
