"""Locks that admit one process to a directory or to an output path, and the removal of files that
killed processes left unfinished."""

import fcntl
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlm_repro.lineage.atomic import HOLDER, OVERWRITE, is_stream, new_directory
from mlm_repro.lineage.digest import is_sealed
from mlm_repro.lineage.errors import BadInput, Interrupted, cause
from mlm_repro.lineage.variables import is_first_rank

LOCK = ".lock"
_HELD: dict[Path, int] = {}
_CLAIMS: list[tuple[Path, int]] = []
"""Pairs of the lock file of a claimed output path and the id of the process that claimed it. A
forked process does not release its parent's locks."""
UNFINISHED = (
    r"\.(iter_\d{{7}}\.partial|"
    r"manifest\.json\.partial-([0-9a-f]{{8}}-)?\d+|.+\.(partial|old|link)-({})\d+)"
)
"""Regular expression of the names of unfinished and of replaced files and directories; the method
`format` inserts the marks of the commands that left them."""


class NoLocks(BadInput):
    """Raised on a file system that has no locks, such as NFS without its lock service: exit code
    2."""


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Context manager: hold the lock of `directory`, which is made if it is missing, during the
    block. Before and after the block, remove the unfinished files that killed writers left in the
    directory.

    Raises BadInput if another process, or this one already, holds the lock, NoLocks if the file
    system cannot lock, and OSError if the directory or its lock file cannot be made. The lock ends
    with the process.
    """
    path = directory / LOCK
    descriptor = _take(path, f"another process is at work in {directory}: wait for it, or stop it")
    try:
        _HELD[path] = descriptor
        # Every holder appends its mark, and a holder that is killed leaves the lock file behind. A
        # marked file is removed only if its mark is there: others may be a living process's.
        mark = os.environ.setdefault(HOLDER, f"{os.urandom(4).hex()}-")
        earlier = os.pread(descriptor, 1 << 16, 0).decode("ascii", "replace").split()
        os.pwrite(descriptor, f"{mark}\n".encode(), 10 * len(earlier))
        _remove_leftovers(directory, earlier)
        try:
            yield
        finally:
            # Killed children carry this mark, which is lost when the lock file is removed.
            _remove_leftovers(directory, [mark])
    finally:
        _release(path)


def _take(path: Path, held: str) -> int:
    """Open the file `path`, made with its folders if it is missing, lock it and return its file
    descriptor.

    Does not wait: raises BadInput with the sentence `held` if another process, or this one already,
    has locked it, NoLocks if the file system cannot lock, and OSError if the file is a link or
    cannot be made or opened.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # another command has just removed the folder
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise BadInput(held) from None
            raise NoLocks(
                f"{path.parent} is on a file system that cannot lock files ({error.strerror}):"
                " choose a folder on another one, such as a local disk"
            ) from error
        # The former holder may have removed the file between its opening and its locking.
        if _is_same(descriptor, path):
            return descriptor
        os.close(descriptor)


def _release(path: Path) -> None:
    descriptor = _HELD.pop(path)
    if _is_same(descriptor, path):
        path.unlink()
    os.close(descriptor)


def release_claims() -> None:
    """Release the locks on all output paths that this process claimed. A forked process leaves its
    parent's locks alone."""
    for lock, process in _CLAIMS:
        if lock in _HELD and process == os.getpid():
            _release(lock)
    _CLAIMS.clear()


def check_held(directory: Path) -> None:
    """Raise Interrupted if this process locked `directory` and it has since been moved, removed or
    replaced. Do nothing for a directory that this process did not lock."""
    path = directory / LOCK
    if path in _HELD and not _is_same(_HELD[path], path):
        raise Interrupted(
            f"{directory} was moved, removed or replaced while this command worked in it, which"
            " writes nothing more there: the same command continues if it is moved back, and else"
            " begins anew"
        )


def claim(path: Path) -> None:
    """Reserve the output path `path` for this process until its command ends, by a lock in the
    user's cache. Raises BadInput if another command of this user has reserved it.

    Does nothing on ranks other than 0, if this process has reserved the path already, or if the
    user's cache cannot hold a lock.
    """
    lock = _lock_of(path)
    if lock not in _HELD and is_first_rank():
        with suppress(OSError, NoLocks):  # a cache that cannot be locked must not stop the work
            _HELD[lock] = _take(
                lock,
                f"another process is about to write {path}: wait for it, or name another place",
            )
            _CLAIMS.append((lock, os.getpid()))


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Context manager: reserve the output path `path` during the block, as `claim` does. Raises
    BadInput if another command of this user has reserved it. The end of the block releases the path
    even if it was claimed before."""
    claim(path)
    try:
        yield
    finally:
        if (lock := _lock_of(path)) in _HELD:
            _release(lock)


def _lock_of(path: Path) -> Path:
    """Return the path of the lock file of an output path, which is in this user's cache, so that no
    lock lies beside a result. For a user without a home it is a path that cannot be made."""
    from hashlib import sha256

    from mlm_repro.lineage.environment import user_cache

    # This user has no home: a path that cannot be made, so that none is locked.
    try:
        return user_cache("places") / sha256(os.path.realpath(path).encode()).hexdigest()
    except RuntimeError:
        return Path(os.devnull) / "place"


def check_is_there(path: Path, kind: str) -> None:
    """Raise BadInput if there is no directory at `path`; `kind` names in the sentence what the
    command expects there, such as a run."""
    if not path.is_dir():
        raise BadInput(f"there is no {kind} {path}")


def check_place(option: str, path: Path | None, mark: str) -> None:
    """Raise BadInput if writing to `path` would fail or lose data. Call it before the work that
    makes the file. A `path` of None is accepted; `option` names it in the sentence.

    The path must not be named twice in this command, nor lie in a sealed directory. An existing
    file that is not empty must contain `mark`, which every result of its kind does, unless the
    command has `--overwrite`. Unless it is a device, a pipe or a link to a file, the path is then
    reserved until the command ends, with the BadInput of `claim`. With an empty `mark` an existing
    file is accepted and nothing is reserved.
    """
    if path is None:
        return
    if path.is_dir():
        raise BadInput(f"{option} {path} is a directory, not a file to write: name a file")
    real = os.path.realpath(path)
    # A path may be a word of its own, or stand behind `--out=` or a source's `jsonl:`.
    named = [
        {word, word.rpartition("=")[2], word.rpartition(":")[2]} - {""} for word in sys.argv[1:]
    ]
    if sum(real in map(os.path.realpath, words) for words in named) > 1:
        raise BadInput(
            f"{option} {path} is named twice in this command, which would lose one of the two:"
            " name another file for one of them"
        )
    folder = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if not folder.is_dir():
        raise BadInput(
            f"{option} {path} cannot be written: {folder} is not a directory; name another place"
        )
    if not os.access(path if is_stream(path) else folder, os.W_OK):
        raise BadInput(
            f"{option} {path} cannot be written: this user may not write to the device, pipe or"
            f" link that is there, or else to the folder {folder}: name another place"
        )
    sealed = next(filter(is_sealed, Path(real).parents), None)
    if sealed:
        raise BadInput(
            f"{option} {path} lies in {sealed}, which is complete and takes no more files: name"
            " another place"
        )
    if mark and not is_stream(path):
        claim(path)
    is_other = path.is_file() and path.stat().st_size and mark.encode() not in path.read_bytes()
    if is_other and OVERWRITE not in os.environ:
        raise BadInput(
            f"{option} {path} exists and is no result of this kind: --overwrite replaces it"
        )


def _remove_leftovers(directory: Path, marks: list[str]) -> None:
    name = re.compile(UNFINISHED.format("|".join(map(re.escape, marks)) or "(?!)"))
    for leftover in [path for path in directory.rglob(".*") if name.fullmatch(path.name)]:
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _is_same(descriptor: int, path: Path) -> bool:
    """Return True if the open file with the number `descriptor` is the one at `path`, False if
    another file, or none, is there."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def check_output(out: Path) -> None:
    """Raise BadInput if the new directory `out` of a command exists, is a link, or would lie in a
    sealed directory."""
    if out.exists() or out.is_symlink():
        raise BadInput(
            f"{out} exists already, and no option replaces it: name a new directory, or remove it"
        )
    for parent in out.resolve().parents:
        if is_sealed(parent):
            raise BadInput(
                f"{out} would lie in {parent}, which is complete and takes no more files: name"
                " another directory"
            )


@contextmanager
def new_output(out: Path) -> Iterator[Path]:
    """Context manager: yield the path of a temporary directory that becomes `out` when the block
    ends without an error. Raises BadInput if `out` exists, lies in a sealed directory, is claimed
    by another command or cannot be written, and in place of an OSError or SafetensorError of the
    block."""
    from safetensors import SafetensorError

    check_output(out)
    try:
        with claimed(out), new_directory(out, claims=True) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:
        raise BadInput(
            f"{out} cannot be written, or what it is made of cannot be read: {cause(error)}"
        ) from error
