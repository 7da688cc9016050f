"""Points at which a process changes files, and what is made to happen there.

`instrument` replaces, in this process and those it forks, the calls through which every file is
written: `open` for writing, `write`, `fsync`, rename, `mkdir` and removal. Nothing in the suite
knows of it. Only files below one folder count.
"""

import builtins
import errno
import io
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["open", "write", "fsync", "rename", "mkdir", "remove"]
FAULTS: dict[str, tuple[Kind, ...]] = {
    "SIGKILL": ("open", "write", "fsync", "rename", "mkdir", "remove"),
    "ENOSPC": ("open", "write", "mkdir"),
    "EIO": ("open", "write", "fsync", "rename", "mkdir"),
    "SIGTERM": ("write", "rename"),
    "SIGSTOP": ("rename",),
    "other": ("rename", "mkdir", "remove"),
    "gone": ("rename", "mkdir"),
    "changed": ("rename", "mkdir"),
}
"""What can happen, and at which kinds of point. A full disk stays full, other errors come once. A
write that fails or is killed has written half of its bytes. While a process stands still the same
command is given beside it from beginning to end (other), or the stage's input goes away or
changes."""
MEANWHILE, STRUCK = ("other", "gone", "changed"), "struck"
"""What happens beside a process that has stopped itself, and the file outside the folder that says
it has."""
ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO}


class Touch(NamedTuple):
    """A point: what was about to be done to which file, of the place's folder."""

    kind: Kind
    path: str


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, in one process, once."""

    stage: str
    rank: int
    number: int
    """Of the point among those of its process; for NaN the iteration, from 0."""
    name: str
    what: str
    """In words: the point, or the tensor that becomes NaN."""


class Instrument:
    """Counts the points of a process, and strikes at one of them."""

    def __init__(self, folder: Path, fault: Fault | None) -> None:
        self.folder, self.fault = os.path.realpath(folder), fault
        self.touches: list[Touch] = []
        self.is_armed = self.is_full = False

    def begin(self, stage: str, rank: int = 0) -> None:
        """This process is now this stage's; its points are counted from 0."""
        self.touches.clear()
        self.is_full = False
        fault = self.fault
        self.is_armed = (
            fault is not None and (fault.stage, fault.rank) == (stage, rank) and fault.name != "NaN"
        )

    def touch(
        self, kind: Kind, path: str | None, half: Callable[[], object] = lambda: None
    ) -> None:
        """A point is reached: count it, and strike if it is the one. `half` does half of what was
        about to be done."""
        if path is None:
            return
        self.touches.append(Touch(kind, os.path.relpath(path, self.folder)))
        if self.is_full and kind in FAULTS["ENOSPC"]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if not self.is_armed or self.fault is None or len(self.touches) - 1 != self.fault.number:
            return
        self.is_armed = False
        name = self.fault.name
        if name in ("SIGKILL", *ERRORS):
            half()
        if name in ERRORS:
            self.is_full = name == "ENOSPC"
            raise OSError(ERRORS[name], os.strerror(ERRORS[name]), path)
        if name in MEANWHILE:
            os.close(os.open(os.path.join(os.path.dirname(self.folder), STRUCK), os.O_CREAT))
        os.kill(os.getpid(), signal.SIGSTOP if name in MEANWHILE else signal.Signals[name])

    def inside(self, path: Any) -> str | None:
        """The path, if it lies below the folder; of an open file the path it was opened by."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        full = os.path.abspath(os.fsdecode(path))
        return full if full.startswith(self.folder + os.sep) else None


def instrument(folder: Path, fault: Fault | None, points: Instrument | None = None) -> Instrument:
    """Replace what writes files in this process, for good. `folder` is where points count."""
    points = points or Instrument(folder, fault)
    _replace_open(points)
    for kind, names in (
        ("rename", "rename replace link"),
        ("mkdir", "mkdir"),
        ("remove", "unlink rmdir"),
    ):
        for name in names.split():
            setattr(os, name, _touching(points, kind, getattr(os, name)))
    os.fsync = _touching(points, "fsync", os.fsync)
    return points


def _touching(points: Instrument, kind: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    def touched(path: Any, *arguments: Any, **options: Any) -> Any:
        if options.get("dir_fd") is None and options.get("src_dir_fd") is None:
            points.touch(kind, points.inside(path))
        return call(path, *arguments, **options)

    return touched


class _Written(io.FileIO):
    """A file whose writes are points."""

    points: Instrument
    path: str | None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.points.touch(
            "write", self.path, lambda: super(_Written, self).write(view[: len(view) // 2])
        )
        return super().write(view)


def _replace_open(points: Instrument) -> None:
    opened = io.open

    def open_(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        path = points.inside(file) if set(mode) & set("wax+") else None
        if path is None:
            return opened(file, mode, buffering, encoding, errors, newline, closefd, opener)
        if not isinstance(file, int):
            points.touch("open", path)
        raw = _Written(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        raw.points, raw.path = points, path
        if buffering == 0:
            return raw
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        buffered = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)

    builtins.open = io.open = open_
