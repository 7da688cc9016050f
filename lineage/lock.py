"""A lock that admits one process to a directory, and removes the unfinished files of killed processes."""

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lineage.atomic import HOLDER
from lineage.errors import BadInput, Interrupted

LOCK = ".lock"
_HELD: dict[Path, int] = {}
"""Descriptor of the lock of each directory that this process works in."""
UNFINISHED = r"\.(iter_\d{{7}}\.partial|manifest\.json\.partial-([0-9a-f]{{8}}-)?\d+|.+\.(partial|old|link)-({})\d+)"
"""Names of unfinished files and directories, and of replaced ones, by the marks of their holders."""


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
        _HELD[directory] = descriptor
        mark = os.environ.setdefault(HOLDER, f"{secrets.token_hex(4)}-")
        earlier = os.pread(descriptor, 1 << 16, 0).decode("ascii", "replace").split()
        os.pwrite(descriptor, f"{mark}\n".encode(), 10 * len(earlier))
        _remove_leftovers(directory, earlier)
        yield
    finally:
        del _HELD[directory]
        if _is_same(descriptor, path):
            path.unlink()
        os.close(descriptor)


def check_held(directory: Path) -> None:
    """Raise Interrupted if a directory that this process locked was moved, removed or exchanged since."""
    if directory in _HELD and not _is_same(_HELD[directory], directory / LOCK):
        raise Interrupted(f"{directory} was moved or removed while it was worked in: nothing more is written there")


def _remove_leftovers(directory: Path, marks: list[str]) -> None:
    """Remove what the holders of these marks left unfinished, and nothing else."""
    name = re.compile(UNFINISHED.format("|".join(map(re.escape, marks)) or "(?!)"))
    for leftover in [path for path in directory.rglob(".*") if name.fullmatch(path.name)]:
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
