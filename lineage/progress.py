"""Messages on standard error during work: the cost before it starts, then progress with the time
left.

On a terminal progress is a bar; elsewhere it is a plain line now and then. Work of less than two
seconds shows nothing. `--quiet` silences both.
"""

import os
import sys
from time import monotonic
from typing import Self

from mlm_repro.lineage.variables import is_first_rank

QUIET = "MLM_QUIET"
"""Name of the environment variable that `--quiet` sets, so that child processes are quiet too."""
SHOWN_AFTER_SECONDS = 2.0
"""Seconds below which finished work shows no progress."""
BAR_COLUMNS = 24
DRAWN_SECONDS = 0.2
"""Shortest time in seconds from one bar to the next on a terminal."""
WRITTEN_SECONDS = 15.0
"""Shortest time in seconds from one line to the next where standard error is no terminal."""


def is_quiet() -> bool:
    """Return True if the user asked, by `--quiet` or by `MLM_QUIET` with any value, for results,
    warnings and errors only."""
    return QUIET in os.environ


def announce(*parts: str) -> None:
    """Print the cost of the following work on one line of standard error: `cost:`, then `parts`,
    phrases, with semicolons between them. Empty phrases are left out; at least one phrase must not
    be empty. Only rank 0 of a distributed run prints, and not with `--quiet`."""
    if not is_quiet() and is_first_rank():
        print(f"cost: {'; '.join(part for part in parts if part)}", file=sys.stderr, flush=True)


def format_bytes(count: float) -> str:
    """Return a size in bytes as text with a decimal unit: `1500000` becomes `1.5 MB`, `999` becomes
    `999 bytes`."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,.0f} bytes"


def format_duration(seconds: float) -> str:
    """Return a duration in seconds, rounded to whole ones, as text: `75` becomes `1:15`, `4000`
    becomes `1:06:40`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class Progress:
    """Context manager that shows the progress of work on standard error. The block is given this
    object and calls `advance`. Shown are the `title`, the finished amount out of `total`, or alone
    if `total` is None, the rate, and the time left. The plural noun `unit` stands behind the
    amount; `bytes` are shown in kB, MB and so on.

    A terminal shows a bar, and any other stream gets a line now and then, but not for work of less
    than two seconds. Only warnings, from `note`, are shown with `--quiet`, and nothing at all on
    ranks other than 0 or if `quiet` is set. With `every`, each multiple of that count prints a line
    that stays, on a terminal above the bar, elsewhere instead of all lines but the last.
    """

    def __init__(
        self,
        title: str,
        total: int | None,
        unit: str,
        quiet: bool = False,
        every: int | None = None,
    ) -> None:
        self._title = title
        self._total = total
        self._unit = unit
        self._every = every
        self._is_other_rank = quiet or not is_first_rank()
        self._is_silent = self._is_other_rank or is_quiet()
        self._terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._start = monotonic()
        self._next = self._start + (SHOWN_AFTER_SECONDS if self._terminal else WRITTEN_SECONDS)
        self._is_drawn = False
        self._first = self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        took_long = monotonic() - self._start >= SHOWN_AFTER_SECONDS
        if kind is None and took_long and not self._is_silent:
            self._show("", final=True)
        elif self._is_drawn:
            sys.stderr.write("\n")

    def start_at(self, count: int) -> None:
        """Set the count of finished work to what an earlier run reached; the rate leaves that part
        out. Nothing is shown."""
        self._first = self._count = count

    def advance(self, count: int = 1, message: str = "") -> None:
        """Add `count` to the finished work, and now and then show the progress on standard error,
        with `message` beside it. If the sum is a multiple of this object's `every`, print a line
        there that stays; a multiple that `count` passes over prints none. Nothing is shown with
        `--quiet`, on ranks other than 0, or if this object's `quiet` was set."""
        self._count += count
        if self._every and self._count % self._every == 0:
            self.say(f"{self._title}: {self._text(False)} | {message}")
        if (
            not self._is_silent
            and monotonic() >= self._next
            and (self._terminal or not self._every)
        ):
            self._next = monotonic() + (DRAWN_SECONDS if self._terminal else WRITTEN_SECONDS)
            self._show(message)

    def say(self, sentence: str) -> None:
        """Print a sentence on a line of standard error that stays; not with `--quiet`, on ranks
        other than 0, or if this object's `quiet` was set."""
        if not self._is_silent:
            self.note(sentence)

    def note(self, sentence: str) -> None:
        """Print a warning on a line of standard error that stays, also with `--quiet`; not on ranks
        other than 0, nor if this object's `quiet` was set."""
        if not self._is_other_rank:
            self._erase()
            sys.stderr.write(f"{sentence}\n")

    def _text(self, final: bool) -> str:
        """Return as text the count of finished work, its rate per second and, if the total is
        known, the time left. If `final` is True, at the end of the work, the text has the time that
        the work took, in place of the time left."""
        elapsed = max(monotonic() - self._start, 1e-9)
        rate = (self._count - self._first) / elapsed
        of_total = f"/{self._amount(self._total)}" if self._total else ""
        text = f"{self._amount(self._count)}{of_total}"
        text += (
            f", {format_bytes(rate)}/s"
            if self._unit == "bytes"
            else f" {self._unit}, {rate:,.1f}/s"
        )
        if final:
            text += f", {format_duration(elapsed)}"
        elif self._total and rate > 0:
            text += f", {format_duration((self._total - self._count) / rate)} left"
        return text

    def _show(self, message: str, final: bool = False) -> None:
        """Write the progress and the text `message` to standard error: on a terminal as a bar, in
        place of the last one, elsewhere as a line. A `final` bar stays."""
        text = self._text(final) + (f" | {message}" if message else "")
        if self._terminal:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            line = f"{self._title}: {self._bar()}{text}"[: columns - 1]
            self._is_drawn = True
            self._erase()
            sys.stderr.write(line + "\n" * final)
            self._is_drawn = not final
        else:
            sys.stderr.write(f"{self._title}: {text}\n")
        sys.stderr.flush()

    def _erase(self) -> None:
        """Remove this object's bar, if one is drawn, from the terminal. The control characters for
        that bypass the stream that escapes them."""
        if self._is_drawn and sys.__stderr__:
            sys.__stderr__.write("\r\x1b[2K")
            sys.__stderr__.flush()

    def _amount(self, count: int) -> str:
        return format_bytes(count) if self._unit == "bytes" else f"{count:,}"

    def _bar(self) -> str:
        if not self._total:
            return ""
        done = min(BAR_COLUMNS * self._count // self._total, BAR_COLUMNS)
        return f"{'█' * done}{'░' * (BAR_COLUMNS - done)} "
