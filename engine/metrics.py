"""The metrics a run writes while it trains. Imports no torch."""

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engine.tensorboard import EventFile
from engine.training_run import METRICS, read_metrics
from lineage.atomic import write_text

EVENTS = Path("tensorboard") / "events.out.tfevents.mlm"
LARGEST = 3.4e38
"""An event file's numbers are fp32; others are in metrics.jsonl alone."""


class MetricsLog:
    """metrics.jsonl, and with `tensorboard` an event file that says the same."""

    def __init__(self, run: Path, reached: int, tensorboard: bool) -> None:
        """Cut back to the iteration a session starts from; the event file is written anew up to there."""
        lines = read_metrics(run) if reached else []
        kept = [line for line in lines if line["iteration"] <= reached and line["kind"] != "final-validation"]
        write_text(run / METRICS, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = (run / METRICS).open("a", encoding="utf-8")
        self._events: EventFile | None = None
        if tensorboard:
            (run / EVENTS).parent.mkdir(exist_ok=True)
            self._events = EventFile(run / EVENTS, time.time())
            for line in kept:
                self._add_event(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._events:
            self._events.close()

    def write(self, line: dict[str, Any]) -> None:
        """Add a line; it is in the file when this returns."""
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        self._add_event(line)

    def _add_event(self, line: dict[str, Any]) -> None:
        """The line's numbers under `kind/name`."""
        if self._events:
            numbers = {
                f"{line['kind']}/{name}": value
                for name, value in line.items()
                if name not in ("kind", "iteration") and type(value) in (int, float) and abs(value) <= LARGEST
            }
            self._events.add_scalars(line["iteration"], numbers, time.time())
