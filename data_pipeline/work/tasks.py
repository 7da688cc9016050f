"""Units of work that may be lost, repeated and moved: files in, one directory out, whole or not at
all."""

import errno
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from mlm_repro.data_pipeline.work.origin import made_by
from mlm_repro.lineage.atomic import JSON, new_directory
from mlm_repro.lineage.digest import sha256_file, sha256_json
from mlm_repro.lineage.errors import BadInput, Interrupted

MARKER = "DONE"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Settings = JSON
Counts = JSON
Work = Callable[[Settings, list[Path], Path], Counts]
"""The work of a task: given settings, input directories and an empty directory, it fills that
directory and returns counts. It must be importable and depend on nothing else."""


@dataclass(frozen=True)
class Input:
    """A directory that a task reads, with the digest of its content."""

    path: Path
    digest: str


@dataclass(frozen=True)
class WorkTask:
    """One piece of work; `settings` can be written as JSON, and counts are JSON."""

    work: Work
    settings: Settings
    inputs: tuple[Input, ...]
    output: Path

    @property
    def digest(self) -> str:
        """Digest of work, code, libraries, settings and inputs, in any workspace; equal tasks have
        equal results."""
        workspace = str(self.output.parent.parent).encode()
        what = {"work": f"{self.work.__module__}.{self.work.__qualname__}"}
        what["settings"] = orjson.dumps(self.settings).replace(workspace, b"").decode()
        return sha256_json(
            {**what, "inputs": [each.digest for each in self.inputs], "made_by": made_by()}
        )


@dataclass(frozen=True)
class Done:
    """A finished task."""

    path: Path
    digest: str
    """Digest of the files it wrote."""
    counts: Counts


def run_task(task: WorkTask, digest: str = "") -> Done:
    """Do the work, unless its marker names the same task and its files are as written.

    Files damaged by a power cut differ from the marker, so the work is done again. Raises
    Interrupted when the memory is full, BadInput if the task has another `digest` on the machine
    that gave it.
    """
    if digest not in ("", task.digest):
        here = "has other code, libraries or another Python than the machine that gives it work"
        raise BadInput(f"the worker on {platform.node()} {here}: install the same on both")
    if (done := finished(task)) is not None:
        return done
    try:
        with new_directory(task.output, durable=False) as directory:
            counts = task.work(task.settings, [each.path for each in task.inputs], directory)
            files = _files(directory)
            (directory / MARKER).write_bytes(
                orjson.dumps({"task": task.digest, "counts": counts, "files": files})
            )
    except MemoryError as error:
        raise Interrupted("there is not enough memory; fewer --workers need less") from error
    return Done(task.output, sha256_json(files), counts)


def finished(task: WorkTask, is_new: bool = False) -> Done | None:
    """The result of a task whose marker and files are there; files that another process writes now
    are not read."""
    try:
        marker = orjson.loads((task.output / MARKER).read_bytes())
        if marker["task"] == task.digest and (is_new or marker["files"] == _files(task.output)):
            return Done(task.output, sha256_json(marker["files"]), marker["counts"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _files(directory: Path) -> dict[str, list[Any]]:
    """Size and SHA-256 of each file of a task."""
    written = sorted(
        path for path in directory.rglob("*") if path.is_file() and path.name != MARKER
    )
    return {
        str(path.relative_to(directory)): [path.stat().st_size, sha256_file(path)]
        for path in written
    }
