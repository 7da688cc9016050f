"""Under torchrun's agent a worker that is killed is started again, with all others, and nothing in the run shows it."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from engine.config import RunConfig
from engine.trainer import Trainer
from tests.engine.small_run import assert_same_training, small_config, train

MODEL = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "seq_length": 16}
RECIPE = {"iterations": 12, "checkpoint_interval": 4, "validation_interval": 12}
KILLED_IN = 6


def train_on_a_rank(config: RunConfig, root: Path, killed: int | None) -> int:
    """Train on this worker, which ends itself in its first life if its rank is `killed`; how often it began again."""
    torch.set_num_threads(1)
    iterate, life = Trainer.iterate, int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def iterate_or_die(trainer: Trainer, iteration: int) -> Any:
        if iteration + 1 == KILLED_IN and life == 0 and int(os.environ["RANK"]) == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return iterate(trainer, iteration)

    Trainer.iterate = iterate_or_die  # type: ignore[method-assign]
    train(config, root)
    return life


def under_torchrun(config: RunConfig, root: Path, killed: int | None) -> int:
    """How often the agent of `torch.distributed.run --nproc-per-node=2 --max-restarts=1` had to begin again."""
    settings = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=1, monitor_interval=0.1, rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0", run_id=root.name, start_method="forkserver",
    )  # fmt: skip
    [life] = {*elastic_launch(settings, train_on_a_rank)(config, root, killed).values()}
    return int(life)


def test_the_curve_of_a_worker_that_was_killed_goes_on(dataset: Path, tmp_path: Path) -> None:
    config = small_config(dataset, MODEL, **RECIPE)
    for folder, killed, lives in (("whole", None, 0), ("first", 0, 1), ("last", 1, 1)):
        assert under_torchrun(config, tmp_path / folder, killed) == lives
    whole, *runs = (next((tmp_path / name).glob("small-*")) for name in ("whole", "first", "last"))
    for run in runs:
        assert_same_training(run, whole)
