"""A small training job and what its run must come to."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlm_repro.engine.run.files import read_metrics
from mlm_repro.experiments.launch.job import Job
from mlm_repro.lineage.config import parse_config
from mlm_repro.lineage.run import RunDirectory
from tests.engine.conftest import write_dataset
from tests.engine.small_run import write_toml

ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
}


def small_job(folder: Path, iterations: int, **values: Any) -> Job:
    """Two ranks on this machine that train the small recipe; all its files stand in `folder`."""
    config = write_toml(
        folder / "small.toml", None, iterations=iterations, checkpoint_interval=1000
    )
    described = {
        "name": "small",
        "model": str(config),
        "dataset": write_dataset(folder / "data"),
        "gpus": False,
        "runs": folder / "runs",
        "nodes": 1,
        "ranks_per_node": 2,
        "cores_per_rank": 1,
        "time_limit": "00:05:00",
        "signal_seconds": 60,
    }
    return parse_config(described | values, Job, "the test")


def assert_trained(runs: Path, iterations: int) -> None:
    """The run is complete, and each iteration was counted once, in order."""
    run = RunDirectory.open(runs / "small")
    assert run.is_complete
    lines = [line for line in read_metrics(run.path) if line["kind"] == "train"]
    assert [line["iteration"] for line in lines] == list(range(1, iterations + 1))
    assert lines[-1]["loss"] < lines[0]["loss"]


def wait_for(condition: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)
