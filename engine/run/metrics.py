"""Metrics and summary as a run writes them. Imports no torch."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engine.run.files import METRICS, SUMMARY, Memory, Step, TrainingSummary, Validation, read_metrics
from engine.run.loggers import Session, Start
from engine.run.resolved import ResolvedRun
from lineage.atomic import write_text
from lineage.files import write_document


class MetricsLog:
    """Writes metrics.jsonl, and passes the same numbers to the loggers. A logger that fails gets no more numbers in
    this session, and `note` gets a sentence about it."""

    def __init__(
        self, run: Path, reached: int, config: dict[str, Any], loggers: dict[str, Start], note: Callable[[str], None],
        earlier: Path | None = None,
    ) -> None:  # fmt: skip
        """Cut the file back to iteration `reached`, from which a session starts, and give each logger these lines. A
        run that continues another begins with the lines of `earlier`."""
        lines = read_metrics(earlier or run) if reached else []
        before = [line for line in lines if line["iteration"] <= reached and line["kind"] != "final-validation"]
        write_text(run / METRICS, "".join(json.dumps(line) + "\n" for line in before))
        self._file = (run / METRICS).open("a", encoding="utf-8")
        self._sessions: dict[str, Session] = {}
        self._note = note
        for name, start in loggers.items():
            with self._leaving_out(name):
                self._sessions[name] = start(run, config)
        for line in before:
            self._log(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        for name, session in list(self._sessions.items()):
            with self._leaving_out(name):
                session.close(kind is None)

    def write(self, line: Step | Validation) -> None:
        """Add a line; it is in the file when this returns."""
        self._file.write(line.to_line())
        self._file.flush()
        self._log(line.to_json())

    def _log(self, line: dict[str, Any]) -> None:
        chosen = {name: line[name] for name in line if name != "iteration" and type(line[name]) in (int, float)}
        numbers = {f"{line['kind']}/{name}": value for name, value in chosen.items()}
        for name, session in list(self._sessions.items()):
            with self._leaving_out(name):
                session.write(line["iteration"], numbers)

    @contextmanager
    def _leaving_out(self, name: str) -> Iterator[None]:
        """Leave a logger out from here on if the block fails."""
        try:
            yield
        except Exception as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            self._note(f"{name} gets no more numbers in this session, metrics.jsonl has them all: {reason}")
            if session := self._sessions.pop(name, None):
                with suppress(Exception):
                    session.close(False)


def write_summary(
    directory: Path, run: ResolvedRun, seconds: float, peaks: list[int], measured_by: str, final: Validation,
    checkpoint: str,
) -> None:  # fmt: skip
    """Write the summary of a run that has ended; `peaks` is memory by rank, `final` the last validation."""
    summary = TrainingSummary(
        parameters=run.parameters, iterations=run.config.train.iterations, tokens=run.tokens,
        seed=run.config.train.seed, layout=run.layout,
        train_seconds=round(seconds, 2), tokens_per_second=round(run.tokens / seconds, 1),
        memory=Memory(closed_form_bytes=run.memory.total, measured_bytes=peaks, measured_by=measured_by),
        validation_samples=final.samples, validation_loss=final.loss, validation_perplexity=final.perplexity,
        checkpoint=checkpoint,
    )  # fmt: skip
    write_document(directory / SUMMARY, summary)
