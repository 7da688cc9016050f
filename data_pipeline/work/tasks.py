"""Units of work that may be lost, repeated and moved: they read files and write one directory,
whole or not at all."""

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
"""Function that does the work of a task: given settings, a list of input directories and an empty
directory, it fills that directory and returns counts. It must be importable and depend on nothing
else."""


@dataclass(frozen=True)
class Input:
    """A directory that a task reads, with the digest of its content, by which tasks are told
    apart."""

    path: Path
    digest: str


@dataclass(frozen=True)
class WorkTask:
    """A unit of work, which `run_task` does: it calls the function `work` with `settings`, the
    paths of the Inputs in `inputs` and an empty directory that becomes `output`, and `work` returns
    counts. Settings and counts are dicts of JSON. Tasks with equal values of the property `digest`
    have equal results."""

    work: Work
    settings: Settings
    inputs: tuple[Input, ...]
    output: Path

    @property
    def digest(self) -> str:
        """Digest of the function, the code, the libraries, the settings and the inputs, the same in
        any workspace. Equal tasks have equal results."""
        # The path of the workspace must not count: a later build may take over the work.
        workspace = str(self.output.parent.parent).encode()
        identity = {"work": f"{self.work.__module__}.{self.work.__qualname__}"}
        identity["settings"] = orjson.dumps(self.settings).replace(workspace, b"").decode()
        return sha256_json(
            {**identity, "inputs": [source.digest for source in self.inputs], "made_by": made_by()}
        )


@dataclass(frozen=True)
class Done:
    """The result of a finished task: its directory, the digest of the files that it wrote there,
    and the counts that its function returned."""

    path: Path
    digest: str
    """Digest of the files that the task wrote."""
    counts: Counts


def run_task(task: WorkTask, digest: str = "") -> Done:
    """Do the work of a task, write its files and the marker `DONE` to its directory, in place of
    what is there, and return its result as a Done; if a marker there names the same task and the
    files are as written, return the earlier result.

    Files damaged by a power cut differ from the marker, so their work is done again. Raises
    Interrupted if the memory is full, BadInput if `digest`, which a machine that sends the task
    gives, is neither empty nor the task's digest here. Errors of the work are passed on.
    """
    if digest not in ("", task.digest):
        raise BadInput(
            f"the Ray worker on {platform.node()} has other code, libraries or another Python than"
            " the machine that gives it work: install the same on both"
        )
    if (done := finished(task)) is not None:
        return done
    try:
        # Files are not forced to the disk: the marker's digests show damage after a power cut.
        with new_directory(task.output, durable=False) as directory:
            counts = task.work(task.settings, [source.path for source in task.inputs], directory)
            files = _files(directory)
            (directory / MARKER).write_bytes(
                orjson.dumps({"task": task.digest, "counts": counts, "files": files})
            )
    except MemoryError as error:
        raise Interrupted(
            "there is not enough memory for a task: run the same command with fewer --workers, and"
            " it continues from what was finished"
        ) from error
    return Done(task.output, sha256_json(files), counts)


def finished(task: WorkTask, is_new: bool = False) -> Done | None:
    """Return the earlier result of a task, a Done, if the marker `DONE` in its directory names the
    same task and the files are as written, else None. With `is_new` the files, which another
    process has just written, are not compared with the marker."""
    try:
        marker = orjson.loads((task.output / MARKER).read_bytes())
        if marker["task"] == task.digest and (is_new or marker["files"] == _files(task.output)):
            return Done(task.output, sha256_json(marker["files"]), marker["counts"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _files(directory: Path) -> dict[str, list[Any]]:
    """Return a dict of the files below a task's directory, without the marker: path below the
    directory → a list of the file's size in bytes and its SHA-256."""
    written = sorted(
        path for path in directory.rglob("*") if path.is_file() and path.name != MARKER
    )
    return {
        str(path.relative_to(directory)): [path.stat().st_size, sha256_file(path)]
        for path in written
    }
