"""Metrics as a run writes them, and loggers people use: TensorBoard, W&B and MLflow. Imports no torch.

Each writes with its own library into a folder of the run directory that has its name, and empties that folder when a
session begins. With WANDB_MODE=online or a MLFLOW_TRACKING_URI the numbers go to the user's server; there each session
is a run of its own.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from mlm_repro.engine.run.files import METRICS, Step, Validation, read_metrics
from mlm_repro.lineage.atomic import write_text
from mlm_repro.lineage.config import flatten
from mlm_repro.lineage.extras import import_extra

EVENTS = Path("tensorboard") / "events.out.tfevents.mlm"
PROJECT = "mlm-repro"
"""W&B's project and MLflow's experiment, unless WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME says otherwise."""
LARGEST = 3.4e38
"""Numbers of an event file are fp32; larger numbers are in metrics.jsonl alone."""
ENVIRONMENT = {
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # MLflow 3 refuses a file store otherwise
}
"""Variables that are set before the libraries are imported, unless the user has set them."""


class Session(NamedTuple):
    """A logger in one session of a run. Both functions raise what the library raises."""

    write: Callable[[int, dict[str, float]], None]
    """(iteration, numbers by name); iterations never fall."""
    close: Callable[[bool], None]
    """Ends the session; the argument is True if the run has ended."""


Start = Callable[[Path, dict[str, Any]], Session]
"""(run directory, configuration) → the session that begins."""


def start_tensorboard(run: Path, config: dict[str, Any]) -> Session:
    """Begin an event file, which is written event by event."""
    events = import_extra("tensorboard.compat.proto.event_pb2", "tensorboard")
    records = import_extra("tensorboard.summary.writer.record_writer", "tensorboard")
    _empty_folder(run / EVENTS.parent)
    file = records.RecordWriter((run / EVENTS).open("wb"))

    def add(**fields: Any) -> None:
        file.write(events.Event(wall_time=time.time(), **fields).SerializeToString())
        file.flush()

    def write(iteration: int, numbers: dict[str, float]) -> None:
        values = [{"tag": name, "simple_value": value} for name, value in numbers.items() if abs(value) <= LARGEST]
        add(step=iteration, summary={"value": values})

    add(file_version="brain.Event:2")
    return Session(write, lambda has_ended: file.close())


def start_wandb(run: Path, config: dict[str, Any]) -> Session:
    """Begin a W&B run, offline unless WANDB_MODE says otherwise; `wandb sync` uploads it.

    A service process of W&B's writes it, which reports a full disk in its `debug-internal.log` alone.
    """
    wandb = import_extra("wandb", "wandb")
    _empty_folder(run / "wandb")
    session = wandb.init(
        dir=run, mode=os.environ.get("WANDB_MODE", "offline"), project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=run.name, config=config, settings=wandb.Settings(silent=True, console="off"),
    )  # fmt: skip

    def close(has_ended: bool) -> None:
        try:
            session.finish(exit_code=0 if has_ended else 1)
        finally:
            wandb.teardown()

    return Session(lambda iteration, numbers: session.log(numbers, step=iteration), close)


def start_mlflow(run: Path, config: dict[str, Any]) -> Session:
    """Begin an MLflow run in a file store, or where MLFLOW_TRACKING_URI says."""
    mlflow = import_extra("mlflow", "mlflow")
    metric, param = mlflow.entities.Metric, mlflow.entities.Param
    place = os.environ.get("MLFLOW_TRACKING_URI")
    if not place:
        (_empty_folder(run / "mlflow") / ".trash").mkdir()  # MLflow makes its own only once in a process
        place = (run / "mlflow").resolve().as_uri()
    client = mlflow.MlflowClient(place)
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    known = client.get_experiment_by_name(name)
    experiment = known.experiment_id if known else client.create_experiment(name)
    session = client.create_run(experiment, run_name=run.name).info.run_id
    client.log_batch(session, params=[param(key, str(value)) for key, value in flatten(config).items()])

    def write(iteration: int, numbers: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        client.log_batch(session, metrics=[metric(*number, now, iteration) for number in numbers.items()])

    return Session(write, lambda has_ended: client.set_terminated(session, "FINISHED" if has_ended else "FAILED"))


LOGGERS: dict[str, Start] = {"tensorboard": start_tensorboard, "wandb": start_wandb, "mlflow": start_mlflow}
"""Each logger by its name in the configuration, which is also that of its extra and its library."""


def open_loggers(names: Iterable[str]) -> dict[str, Start]:
    """The loggers of these names, ready to start. Raises BadInput if a library is missing."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    chosen = {name: LOGGERS[name] for name in names}
    for name in chosen:
        import_extra(name, name)
    return chosen


def _empty_folder(folder: Path) -> Path:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    return folder


@contextmanager
def writing_metrics(
    run: Path, reached: int, config: dict[str, Any], loggers: dict[str, Start], note: Callable[[str], None],
    earlier: Path | None = None,
) -> Iterator[Callable[[Step | Validation], None]]:  # fmt: skip
    """A function that adds a line to metrics.jsonl and passes the same numbers to the loggers.

    The line is in the file when it returns. The file is first cut back to iteration `reached`, from which a session
    starts, and each logger is given these lines; a run that continues another begins with the lines of `earlier`. A
    logger that fails gets no more numbers in this session, and `note` gets a sentence about it.
    """
    lines = read_metrics(earlier or run) if reached else []
    before = [line for line in lines if line["iteration"] <= reached and line["kind"] != "final-validation"]
    write_text(run / METRICS, "".join(json.dumps(line) + "\n" for line in before))
    sessions: dict[str, Session] = {}

    @contextmanager
    def leaving_out(name: str) -> Iterator[None]:
        """Leave a logger out from here on if the block fails."""
        try:
            yield
        except Exception as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            note(f"{name} gets no more numbers in this session, metrics.jsonl has them all: {reason}")
            if session := sessions.pop(name, None):
                with suppress(Exception):
                    session.close(False)

    def log(line: dict[str, Any]) -> None:
        chosen = {name: line[name] for name in line if name != "iteration" and type(line[name]) in (int, float)}
        numbers = {f"{line['kind']}/{name}": value for name, value in chosen.items()}
        for name, session in list(sessions.items()):
            with leaving_out(name):
                session.write(line["iteration"], numbers)

    def write(line: Step | Validation) -> None:
        file.write(line.to_line())
        file.flush()
        log(line.to_json())

    has_ended = False
    try:
        for name, start in loggers.items():
            with leaving_out(name):
                sessions[name] = start(run, config)
        for line in before:
            log(line)
        with (run / METRICS).open("a", encoding="utf-8") as file:
            yield write
        has_ended = True
    finally:
        for name, session in list(sessions.items()):
            with leaving_out(name):
                session.close(has_ended)
