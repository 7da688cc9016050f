"""Answers that a machine computed once, kept in the user's cache for later processes.

A file holds one answer behind a digest of it and of what it was made of. One that is cut short,
damaged or made of something else is no answer, and files are replaced whole, so that any number of
processes may write at once.
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
    """SHA-256 of names and content of the files in folders, of this Python, and of the text of
    other facts."""
    digest = hashlib.sha256(f"{sys.version} {facts}".encode())
    for place in places:
        for folder, inner, files in os.walk(place):
            inner[:] = sorted({*inner} - {"__pycache__"})
            below = os.path.relpath(folder, place)
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
    """The answer of that name, if a process kept one that was made of the same."""
    with suppress(OSError, RuntimeError):  # RuntimeError: no home
        content = read_bytes(user_cache("answers") / name)
        if content[:32] == _seal(made_of, content[32:]):
            return content[32:]
    return None


def remember(name: str, made_of: str, answer: bytes) -> None:
    """Keep an answer in the place of the one of that name, if there is a place where that can
    be."""
    with suppress(OSError, RuntimeError):
        write_bytes(user_cache("answers") / name, _seal(made_of, answer) + answer)


def stamp_of(path: Any) -> str:
    """A string that changes whenever the file does: inode, size and time of change."""
    status = path.stat()
    return f"{status.st_ino}-{status.st_size}-{status.st_ctime_ns}"


@contextmanager
def answers_on_files(
    name: str, made_of: str, answer_on: Callable[[Path], Any]
) -> Iterator[Callable[[Path], Any]]:
    """A function that gives `answer_on` of a file, a JSON value, and asks for it only if the file
    was changed since."""
    content = recall(name, made_of)
    known: dict[str, tuple[str, Any]] = parse_json(content) if content else {}
    fresh: dict[str, tuple[str, Any]] = {}

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
