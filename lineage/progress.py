"""Progress with rate and time left: one line redrawn on a terminal, a plain line now and then elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self


def format_duration(seconds: float) -> str:
    """`75` becomes `1:15`, `4000` becomes `1:06:40`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class Progress:
    """Counts towards `total` on standard error; silent when `quiet` (other ranks of a parallel run)."""

    def __init__(self, title: str, total: int | None, unit: str, quiet: bool = False) -> None:
        self._title, self._total, self._unit, self._quiet = title, total, unit, quiet
        self._terminal = sys.stderr.isatty()
        self._interval_seconds = 0.2 if self._terminal else 15.0
        self._start = self._shown = time.monotonic()
        self._first = self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._quiet and kind is None:
            self._show("", final=True)
        elif self._terminal and not self._quiet:
            sys.stderr.write("\n")

    def start_at(self, count: int) -> None:
        """Work already done by an earlier run, not counted in the rate."""
        self._first = self._count = count

    def advance(self, count: int = 1, message: str = "") -> None:
        """Count work done; `message` is shown beside the count."""
        self._count += count
        now = time.monotonic()
        if not self._quiet and now - self._shown >= self._interval_seconds:
            self._shown = now
            self._show(message)

    def note(self, sentence: str) -> None:
        """Say something on a line of its own."""
        if not self._quiet:
            sys.stderr.write(("\r\x1b[2K" if self._terminal else "") + f"{sentence}\n")

    def _show(self, message: str, final: bool = False) -> None:
        elapsed = max(time.monotonic() - self._start, 1e-9)
        rate = (self._count - self._first) / elapsed
        of_total = f"/{self._total:,}" if self._total else ""
        text = f"{self._title}: {self._count:,}{of_total} {self._unit}, {rate:,.1f}/s"
        if final:
            text += f", {format_duration(elapsed)}"
        elif self._total and rate > 0:
            text += f", {format_duration((self._total - self._count) / rate)} left"
        if message:
            text += f" | {message}"
        if self._terminal:
            sys.stderr.write(f"\r\x1b[2K{text}" + ("\n" if final else ""))
        else:
            sys.stderr.write(text + "\n")
        sys.stderr.flush()
