"""The metrics a run writes while it trains. Imports no torch."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engine.run.directory import read_metrics
from engine.run.files import METRICS, Step, Validation
from engine.run.loggers import Logger
from lineage.atomic import write_text


class MetricsLog:
    """metrics.jsonl, and the loggers that are told the same.

    A logger that fails is told no more in this session, and `note` gets a sentence that says so.
    """

    def __init__(
        self, run: Path, reached: int, config: dict[str, Any], loggers: dict[str, Logger], note: Callable[[str], None]
    ) -> None:
        """Cut back to the iteration a session starts from; each logger is told all lines up to there."""
        lines = read_metrics(run) if reached else []
        kept = [line for line in lines if line["iteration"] <= reached and line["kind"] != "final-validation"]
        write_text(run / METRICS, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = (run / METRICS).open("a", encoding="utf-8")
        self._loggers, self._note = dict(loggers), note
        self._tell(lambda logger: logger.start(run, config))
        for line in kept:
            self._log(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._tell(lambda logger: logger.close(kind is None))

    def write(self, line: Step | Validation) -> None:
        """Add a line; it is in the file when this returns."""
        self._file.write(line.to_line())
        self._file.flush()
        self._log(line.to_json())

    def _log(self, line: dict[str, Any]) -> None:
        """Tell the line's numbers under `kind/name`."""
        numbers = {
            f"{line['kind']}/{name}": value
            for name, value in line.items()
            if name not in ("kind", "iteration") and type(value) in (int, float)
        }
        self._tell(lambda logger: logger.write(line["iteration"], numbers))

    def _tell(self, verb: Callable[[Logger], None]) -> None:
        """The same to every logger that has not failed."""
        for name, logger in list(self._loggers.items()):
            try:
                verb(logger)
            except Exception as error:
                del self._loggers[name]
                reason = str(error).partition("\n")[0] or type(error).__name__
                self._note(f"{name} gets no more numbers in this session, metrics.jsonl has them all: {reason}")
                with suppress(Exception):
                    logger.close(False)
