"""Writers of a run's metrics: metrics.jsonl, and TensorBoard beside it. Imports no torch.

A logger writes with its own library into a folder of the run directory that has its name, and
empties that folder when a session begins.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from mlm_repro.engine.run.files import METRICS, Step, Validation, read_metrics
from mlm_repro.lineage.atomic import JSON, write_text
from mlm_repro.lineage.extras import import_extra

EVENTS = Path("tensorboard") / "events.out.tfevents.mlm"
LARGEST = 3.4e38
"""Largest absolute value that an event file takes, which is fp32; larger numbers are in
metrics.jsonl alone."""


class Session(NamedTuple):
    """Pair of functions of a logger for one session of a run: `write(iteration, numbers)` writes
    `numbers`, a dict name → number, and `close()` ends the session. Either raises the errors of the
    logger's library."""

    write: Callable[[int, dict[str, float]], None]
    """Function (iteration, numbers by name) that writes the numbers and returns nothing; from call
    to call the iteration never falls."""
    close: Callable[[], None]


Start = Callable[[Path], Session]
"""Type of a function (run directory) → Session, which begins a session of one logger and may raise
any error of its library."""


def start_tensorboard(run: Path) -> Session:
    """Begin a session of TensorBoard in the run directory `run`: empty TensorBoard's folder there,
    and return a Session. Its `write(iteration, numbers)` adds `numbers`, a dict name → number, to a
    new event file, without NaN and numbers too large for fp32; its `close()` closes the file.
    Raises BadInput if tensorboard is missing."""
    events = import_extra("tensorboard.compat.proto.event_pb2", "tensorboard")
    records = import_extra("tensorboard.summary.writer.record_writer", "tensorboard")
    if (folder := run / EVENTS.parent).exists():
        shutil.rmtree(folder)
    folder.mkdir()
    file = records.RecordWriter((run / EVENTS).open("wb"))

    def add(**fields: Any) -> None:
        file.write(events.Event(wall_time=time.time(), **fields).SerializeToString())
        file.flush()

    def write(iteration: int, numbers: dict[str, float]) -> None:
        values = [
            {"tag": name, "simple_value": value}
            for name, value in numbers.items()
            if abs(value) <= LARGEST
        ]
        add(step=iteration, summary={"value": values})

    add(file_version="brain.Event:2")
    return Session(write, file.close)


LOGGERS: dict[str, Start] = {"tensorboard": start_tensorboard}
"""Name of a logger in the configuration → function (run directory) → Session that begins its
session. Its extra and its library have the same name."""


def open_loggers(names: Iterable[str]) -> dict[str, Start]:
    """Return a dict name → function (run directory) → Session, which begins a session of that
    logger, for each of these names. Raises BadInput if a logger's library is missing, KeyError for
    an unknown name."""
    chosen = {name: LOGGERS[name] for name in names}
    for name in chosen:
        import_extra(name, name)
    return chosen


@contextmanager
def writing_metrics(
    run: Path,
    reached: int,
    loggers: dict[str, Start],
    note: Callable[[str], None],
    earlier: Path | None = None,
) -> Iterator[Callable[[Step | Validation], None]]:
    """Context manager: yield a function that adds a Step or a Validation, as a line, to
    metrics.jsonl of the run directory `run` and passes the same numbers to `loggers`, a dict as
    `open_loggers` returns it. A session of each logger begins and is closed with the block. Only
    the first rank calls it.

    The line is in the file when the function returns. The file is first cut back to iteration
    `reached`, from which a session starts, and loses a final validation and all lines from a
    damaged one on; each logger is given the lines that stay, none if `reached` is 0. In the first
    session of a run that continues another, the lines of that run, in the directory `earlier`, are
    taken instead; later sessions leave `earlier` out. A logger that fails gets no more numbers in
    this session, and the function `note` is called with a sentence about it.
    """
    lines = read_metrics(earlier or run) if reached else []
    before = [
        line
        for line in lines
        if line["iteration"] <= reached and line["kind"] != "final-validation"
    ]
    write_text(run / METRICS, "".join(json.dumps(line) + "\n" for line in before))
    sessions: dict[str, Session] = {}

    @contextmanager
    def leaving_out(name: str) -> Iterator[None]:
        """Context manager: if the block raises an Exception, call `note` with a sentence that ends
        in its first line, close the session of the logger `name` and give it no more numbers. The
        exception is not passed on."""
        try:
            yield
        except Exception as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            note(
                f"{name} gets no more numbers in this session, metrics.jsonl has them all: {reason}"
            )
            if session := sessions.pop(name, None):
                with suppress(Exception):
                    session.close()

    def log(line: JSON) -> None:
        numbers = {
            f"{line['kind']}/{name}": value
            for name, value in line.items()
            if name != "iteration" and type(value) in (int, float)
        }
        for name, session in list(sessions.items()):
            with leaving_out(name):
                session.write(line["iteration"], numbers)

    def write(line: Step | Validation) -> None:
        file.write(line.to_line())
        file.flush()
        log(line.to_json())

    try:
        for name, start in loggers.items():
            with leaving_out(name):
                sessions[name] = start(run)
        for line in before:
            log(line)
        with (run / METRICS).open("a", encoding="utf-8") as file:
            yield write
    finally:
        for name, session in list(sessions.items()):
            with leaving_out(name):
                session.close()
