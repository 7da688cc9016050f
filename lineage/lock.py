"""A lock that admits one process to a directory, and removes the unfinished files of killed processes."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lineage.errors import BadInput

LOCK = ".lock"
LEFTOVERS = (".*.partial*", ".*.old-*", ".*.link-*")
"""Names of unfinished files and directories, and of replaced ones that wait to be removed."""


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock `directory` for this process, after removing what killed writers left in it.

    Raises BadInput if another process holds it. The lock ends with the process.
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
    """False if the former holder removed the file that is locked."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
