"""A cache of answers that a machine computed once, in the user's cache folder, for later processes.

A file holds a digest of the key and the answer, then the answer. A file that is cut short, damaged
or stored under another key is a miss. Files are replaced whole, so that any number of processes may
write at once.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mlm_repro.lineage.atomic import open_file, parse_json, read_bytes, write_bytes
from mlm_repro.lineage.environment import user_cache


def digest_of(*places: Path, facts: object = ()) -> str:
    """Return a cache key: the hexadecimal SHA-256 of this Python's version, the text of `facts`,
    and the names and contents of all files below the folders `places`, `__pycache__` excepted. An
    unreadable file counts by its error, a folder that is missing or unreadable as an empty one."""
    digest = hashlib.sha256(f"{sys.version} {facts}".encode())
    for root in places:
        for folder, inner, files in os.walk(root):
            inner[:] = sorted({*inner} - {"__pycache__"})
            below = os.path.relpath(folder, root)
            for name in sorted(files):
                try:
                    with open_file(os.path.join(folder, name)) as file:
                        content = file.read()
                except OSError as error:
                    content = str(error).encode("utf-8", "surrogateescape")
                digest.update(
                    f"{below}/{name} {len(content)}\n".encode("utf-8", "surrogateescape") + content
                )
    return digest.hexdigest()


def recall(name: str, made_of: str) -> bytes | None:
    """Return the answer called `name` in this user's cache as bytes, or None if it is absent,
    damaged or was stored under another key than `made_of`."""
    with suppress(OSError, RuntimeError):  # RuntimeError: this user has no home
        content = read_bytes(user_cache("answers") / name)
        if content[:32] == _seal(made_of, content[32:]):
            return content[32:]
    return None


def remember(name: str, made_of: str, answer: bytes) -> None:
    """Store the bytes `answer` in this user's cache as the only answer called `name`, in place of
    an earlier one under any key. The function `recall` returns it for the same key `made_of` alone.
    Does nothing if the cache cannot be written."""
    with suppress(OSError, RuntimeError):
        write_bytes(user_cache("answers") / name, _seal(made_of, answer) + answer)


def stamp_of(path: Any) -> str:
    """Return a text that changes whenever the file at `path`, a Path, does: its inode, size and
    change time. The text for a Remote has the size and a digest of the facts, such as the ETag, by
    which the server marks the file's content; if the server states none of them, a change that
    keeps the size is not seen. Raises OSError if a local file is missing, for a remote file the
    errors of Remote."""
    status = path.stat()
    return f"{status.st_ino}-{status.st_size}-{status.st_ctime_ns}"


@contextmanager
def answers_on_files(
    name: str, made_of: str, answer_on: Callable[[Path], Any]
) -> Iterator[Callable[[Path], Any]]:
    """Context manager: yield a function that returns `answer_on(path)`, a JSON value, for the path
    of a file, and computes it only if the file changed since the cached answer. The answers are
    cached together as `name`, under the key `made_of`.

    New answers are cached when the block ends without an error.
    """
    content = recall(name, made_of)
    known: dict[str, tuple[str, Any]] = parse_json(content) if content else {}
    fresh = {}

    def answer(path: Path) -> Any:
        stamp = stamp_of(path)
        if known.get(str(path), ("",))[0] != stamp:
            known[str(path)] = fresh[str(path)] = (stamp, answer_on(path))
        return known[str(path)][1]

    yield answer
    if fresh:
        remember(name, made_of, json.dumps(known).encode())


def _seal(made_of: str, answer: bytes) -> bytes:
    return hashlib.sha256(made_of.encode() + answer).digest()
