"""Loggers people use: TensorBoard, Weights & Biases and MLflow. Imports no torch.

Each writes, with its own library, into a folder of the run directory that bears its name, and begins a session with
that folder empty. With WANDB_MODE=online or a MLFLOW_TRACKING_URI the numbers go to the user's server; there each
session is a run of its own.
"""

import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from lineage.config import flatten
from lineage.extras import import_extra

EVENTS = Path("tensorboard") / "events.out.tfevents.mlm"
PROJECT = "mlm-repro"
"""W&B's project and MLflow's experiment, unless WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME says otherwise."""
LARGEST = 3.4e38
"""An event file's numbers are fp32; others are in metrics.jsonl alone."""


class Logger(Protocol):
    """Takes the numbers of one session of a run. Every verb raises what its library raises."""

    def start(self, run: Path, config: dict[str, Any]) -> None:
        """Begin a session of the run in directory `run`."""

    def write(self, iteration: int, numbers: dict[str, float]) -> None:
        """Add numbers by name; `iteration` is never below the one before."""

    def close(self, finished: bool) -> None:
        """End a session that was started; `finished` if the run came to its end."""


class TensorBoard:
    """An event file, written event by event."""

    def __init__(self) -> None:
        self._events = import_extra("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._records = import_extra("tensorboard.summary.writer.record_writer", "tensorboard")

    def start(self, run: Path, config: dict[str, Any]) -> None:
        _empty_folder(run / EVENTS.parent)
        self._file = self._records.RecordWriter((run / EVENTS).open("wb"))
        self._add(file_version="brain.Event:2")

    def write(self, iteration: int, numbers: dict[str, float]) -> None:
        values = [{"tag": name, "simple_value": value} for name, value in numbers.items() if abs(value) <= LARGEST]
        self._add(step=iteration, summary={"value": values})

    def close(self, finished: bool) -> None:
        self._file.close()

    def _add(self, **fields: Any) -> None:
        self._file.write(self._events.Event(wall_time=time.time(), **fields).SerializeToString())
        self._file.flush()


class WeightsAndBiases:
    """A W&B run, offline unless WANDB_MODE says otherwise; `wandb sync` uploads it.

    A service process of W&B's writes it, which notes a full disk in its `debug-internal.log` and nowhere else.
    """

    def __init__(self) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._wandb = import_extra("wandb", "wandb")

    def start(self, run: Path, config: dict[str, Any]) -> None:
        _empty_folder(run / "wandb")
        self._run = self._wandb.init(
            dir=run,
            mode=os.environ.get("WANDB_MODE", "offline"),
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            config=config,
            settings=self._wandb.Settings(silent=True, console="off"),
        )

    def write(self, iteration: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=iteration)

    def close(self, finished: bool) -> None:
        try:
            self._run.finish(exit_code=0 if finished else 1)
        finally:
            self._wandb.teardown()


class MLflow:
    """An MLflow run in a file store, or where MLFLOW_TRACKING_URI says."""

    def __init__(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 refuses a file store otherwise
        self._mlflow = import_extra("mlflow", "mlflow")

    def start(self, run: Path, config: dict[str, Any]) -> None:
        place = os.environ.get("MLFLOW_TRACKING_URI")
        if not place:
            (_empty_folder(run / "mlflow") / ".trash").mkdir()  # MLflow makes its own only once in a process
            place = (run / "mlflow").resolve().as_uri()
        self._client = self._mlflow.MlflowClient(place)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
        param = self._mlflow.entities.Param
        self._client.log_batch(self._id, params=[param(key, str(value)) for key, value in flatten(config).items()])

    def write(self, iteration: int, numbers: dict[str, float]) -> None:
        now, metric = int(time.time() * 1000), self._mlflow.entities.Metric
        self._client.log_batch(self._id, metrics=[metric(*number, now, iteration) for number in numbers.items()])

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "FAILED")


LOGGERS: dict[str, type[Logger]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}
"""By their names in the configuration, which are those of their extras."""


def open_loggers(names: Iterable[str]) -> dict[str, Logger]:
    """The loggers of these names, not yet started. Raises BadInput if a library is missing."""
    return {name: LOGGERS[name]() for name in names}


def _empty_folder(folder: Path) -> Path:
    """The folder, new. Raises OSError if it cannot be."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    return folder
