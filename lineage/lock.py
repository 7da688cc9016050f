"""One process at a time in a directory; what a killed one left half-written there is removed."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lineage.errors import BadInput

LOCK = ".lock"
LEFTOVERS = (".*.partial*", ".*.old-*", ".*.link-*")
"""Names under which unfinished files and directories are written and replaced ones wait to be removed."""


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold `directory` for this process alone, free of what killed writers left in it.

    Raises BadInput if another process holds it. The lock ends with the process, however that ends.
    """
    path = directory / LOCK
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise BadInput(f"another process is at work in {directory}: wait for it, or stop it") from None
        if _is_same(descriptor, path):
            break
        os.close(descriptor)
    try:
        _remove_leftovers(directory)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _remove_leftovers(directory: Path) -> None:
    for leftover in [path for pattern in LEFTOVERS for path in directory.rglob(pattern)]:
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _is_same(descriptor: int, path: Path) -> bool:
    """Whether the file that is locked still has its name, and was not removed by the process that held it before."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
