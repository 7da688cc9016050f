"""Files and directories appear whole or not at all: temporary sibling, fsync, rename. Reads are
bounded."""

import errno
import io
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

JSON = dict[str, Any]
"""An object of JSON: values by name."""

HOLDER = "MLM_HOLDER"
"""Name of the environment variable with the mark of the command that locked a run. Its child
processes inherit it."""
OVERWRITE = "MLM_OVERWRITE"
"""Name of the environment variable that the option `--overwrite` sets."""
MARKER = "COMPLETE"
"""Name of the file that seals a directory."""
NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EINVAL}
"""Error numbers of an attempt to make a link on a file system that has no links."""
MOST_BYTES = 256 << 20
"""Largest file that is read whole, in bytes."""


@contextmanager
def open_file(path: Path | str) -> Iterator[io.BufferedReader]:
    """Context manager: open the file at `path` for reading its bytes, and yield it. Raises OSError
    also for a pipe or a device, which could block a reader for ever."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        yield file


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of the file at `path` in bytes. Raises OSError as `open_file` does, and if
    the file has more than `most` bytes, by default 256 MiB."""
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
        return file.read()


def parse_json(
    text: bytes | str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """Return the value of `text`, which is JSON, in Python's types; `pairs`, if given, builds each
    object from its list of pairs (key, value). NaN and Infinity, which JSON lacks, are read as
    floats. Raises ValueError if the text is not JSON or is nested too deeply."""
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: Path) -> Any:
    """Return the value of the JSON file at `path` in Python's types. Raises OSError as `read_bytes`
    does, and ValueError as `parse_json` does, if the file is not JSON."""
    return parse_json(read_bytes(path))


def is_stream(path: Path) -> bool:
    """Return True if `path` is an existing device, pipe or link to a file. Such a path is written
    to, not replaced."""
    return path.exists() and not path.is_dir() and (path.is_symlink() or not path.is_file())


def hidden_beside(path: Path, word: str) -> Path:
    """Return the path of a hidden sibling of `path` for unfinished data; the sibling is not made.

    Its name holds three texts: `word`; the lock holder's mark, from `MLM_HOLDER`; and this
    process's id. By these a later lock on the folder recognises what a killed process left, if
    `word` is `partial`, `old` or `link`.
    """
    return path.with_name(f".{path.name}.{word}-{os.environ.get(HOLDER, '')}{os.getpid()}")


def write_bytes(path: Path, data: bytes, replaces: bool = True) -> bool:
    """Write the bytes `data` to the file `path` and make its missing folders; a reader sees the old
    content or the new, never a mixture. Data that were written outlast a power cut once this
    returns.

    Return True if the data were written; with `replaces=False` an existing file stays, and the
    answer is False. A device, a pipe or a link to a file is written to in any case, in place,
    without these promises. Raises OSError if the file cannot be written.
    """
    if is_stream(path):
        path.write_bytes(data)
        return True
    make_directory(path.parent)
    temporary = hidden_beside(path, "partial")
    # The first writer may have removed unfinished files of others.
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if replaces:
            os.replace(temporary, path)
        else:
            _put(temporary, path)
    # The command that named the file first may have removed this one's temporary file since.
    except (FileExistsError, FileNotFoundError):
        if replaces or not path.exists():
            raise
        return False
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)
    return True


def _put(temporary: Path, path: Path) -> None:
    """Give a finished temporary file the name `path`; the temporary name may stay. Raises
    FileExistsError if the name is taken.

    A file system may have no links (exFAT, SMB, many of FUSE). There, if two commands begin the
    same work at the same instant, the second overwrites the first's file; the lock that follows
    admits only one of them.
    """
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, "it exists", str(path)) from error
        os.replace(temporary, path)


def write_text(path: Path, text: str) -> None:
    """Write `text` to the file `path` in UTF-8, as `write_bytes` writes bytes: missing folders are
    made, and an existing file is replaced whole."""
    write_bytes(path, text.encode("utf-8"))


def json_bytes(value: Any) -> bytes:
    """Return `value` as the UTF-8 bytes of a JSON file, indented by two, with the keys in their
    order and a newline at the end. Raises ValueError for a number that is not finite."""
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")


def write_json(path: Path, value: Any, replaces: bool = True) -> bool:
    """Write `value` as indented JSON to the file `path`, as `write_bytes` writes bytes; return True
    if it was written. With `replaces=False` an existing file stays. Raises ValueError for a number
    that is not finite."""
    return write_bytes(path, json_bytes(value), replaces)


@contextmanager
def new_directory(path: Path, durable: bool = True, claims: bool = False) -> Iterator[Path]:
    """Context manager: yield the path of an empty temporary sibling that becomes the directory
    `path` when the block ends without an error. Missing parents of `path` are made, and stay.

    An existing directory at `path` is replaced only then. If this call `claims` the name, it makes
    an empty `path` at once, and raises FileExistsError if there is one, or if another command has
    written there when the block ends. On an error the temporary directory and the empty `path` are
    removed. With `durable=False` a power cut may leave a directory with incomplete files.
    """
    make_directory(path.parent)
    if claims:
        path.mkdir()
    temporary = hidden_beside(path, "partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        if claims and any(path.iterdir()):
            raise FileExistsError(errno.EEXIST, "another command wrote there meanwhile", str(path))
        publish_directory(temporary, path, durable)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        if claims:
            with suppress(OSError):  # another command wrote a file there
                path.rmdir()
        raise


def publish_directory(temporary: Path, path: Path, durable: bool = True) -> None:
    """Rename the finished directory `temporary` to `path`, in place of an old directory, which is
    removed. An old one with files is first renamed, so that for a moment nothing is at `path`. With
    `durable`, the default, flush the finished directory's files to disk first."""
    for written in [*temporary.rglob("*"), temporary] if durable else ():
        sync(written)
    # A rename cannot replace a directory that holds files.
    if path.exists() and any(path.iterdir()):
        old = hidden_beside(path, "old")
        os.replace(path, old)
        os.replace(temporary, path)
        shutil.rmtree(old)
    else:
        os.replace(temporary, path)
    if durable:
        sync(path.parent)


def make_directory(path: Path) -> None:
    """Make the directory `path` and its missing parents, and sync each parent so that a power cut
    does not lose the new name. Does nothing if the directory is there."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def sync(path: Path) -> None:
    """Make the content of a file, or renames inside a directory, durable.

    Does nothing for a directory on a system that cannot open directories. Raises OSError if a file
    is missing or cannot be opened, or if the system cannot write to the disk.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        if path.is_dir():
            return
        raise
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
