"""Eight ranks on however few cores: they finish, and a SIGTERM to one of them leaves what goes on bit for bit."""

import os
import signal
from pathlib import Path
from typing import Any

from engine.config import RunConfig
from engine.trainer import Trainer
from lineage.errors import Interrupted
from tests.engine.small_run import assert_same_training, small_config, train
from tests.ranks import run_ranks

MODEL = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "seq_length": 16}
RECIPE = {
    "iterations": 6,
    "warmup_iterations": 1,
    "microbatch_size": 2,
    "validation_interval": 6,
    "keep_checkpoints": 1,
}
STOPPED_IN, STOPPED_RANK = 3, 5


def train_until_a_signal(config: RunConfig, root: Path, is_stopped: bool) -> str:
    """What a rank has to say at the end; one of them gets a SIGTERM in the middle if `is_stopped`."""
    iterate = Trainer.iterate

    def iterate_and_stop(trainer: Trainer, iteration: int) -> Any:
        if is_stopped and iteration + 1 == STOPPED_IN and int(os.environ["RANK"]) == STOPPED_RANK:
            os.kill(os.getpid(), signal.SIGTERM)
        return iterate(trainer, iteration)

    Trainer.iterate = iterate_and_stop  # type: ignore[method-assign]
    try:
        return str(train(config, root).path)
    except Interrupted as error:
        return str(error)


def test_eight_ranks_finish_and_go_on_after_a_signal(dataset: Path, tmp_path: Path) -> None:
    values = small_config(dataset, MODEL, **RECIPE).model_dump() | {"parallel": {"tp": 2, "pp": 2}}
    config = RunConfig.model_validate(values)
    [whole] = {*run_ranks(train_until_a_signal, 8, config, tmp_path / "whole", False)}
    said = run_ranks(train_until_a_signal, 8, config, tmp_path / "stopped", True)
    assert all(sentence.startswith(f"stopped after iteration {STOPPED_IN} of 6;") for sentence in said)
    [resumed] = {*run_ranks(train_until_a_signal, 8, config, tmp_path / "stopped", False)}
    assert_same_training(Path(resumed), Path(whole))
