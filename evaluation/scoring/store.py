"""Scores on disk, batch by batch, so that a killed evaluation resumes and a finished one is not
repeated.

Each evaluation has a directory, named by a digest of all that its bits depend on. Each process adds
a file of records:

    index u32, tokens u32, BLAKE2b u8[16] of the directory's name and of the rest,
    log-probabilities f64[tokens],
    greedy u8[tokens], allowed u8[tokens]

A record is trusted if its digest is right and only this user can have written the file, which must
not be a link. Records after a wrong one, such as the torn end that a kill leaves, are computed
again. WikiText-103 takes 2.6 MiB and LAMBADA 70 KiB; beyond LARGEST_BYTES the least recently used
evaluations are removed.
"""

import hashlib
import os
import shutil
import stat
import struct
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import IO

import numpy as np

from mlm_repro.evaluation.protocol import Scores, Tokens
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.digest import sha256_json

LARGEST_BYTES = 256 * 2**20
HEADER = struct.Struct("<II16s")
BYTES_PER_TOKEN = 10
SUFFIX = ".scores"
WRITABLE = stat.S_IWGRP | stat.S_IWOTH
"""Permission bits that let others than the owner write."""


class StoredScores:
    """Scores of one evaluation in the folder `directory`, by a batch's number. The method `add`
    appends the Scores of a batch to a file of this process, which its first call creates; `read`,
    which is given the expected numbers of scored tokens, returns the Scores of all processes. At
    the end each process calls `close`: if the process has added any, `close` also removes the least
    recently used evaluations beside this one while all together have more than LARGEST_BYTES.

    If the folder cannot be written, nothing is kept, and no error is raised.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: IO[bytes] | None = None

    def close(self) -> None:
        """Close this process's file, and remove the directories of the least recently used
        evaluations beside this one while all together have more than LARGEST_BYTES; the most
        recently used one stays. Does nothing if no scores were added."""
        if self._file:
            self._file.close()
            remove_oldest(self._directory.parent)

    def read(self, num_scored: Sequence[Tokens]) -> dict[int, Scores]:
        """Return a dict number of a batch → its Scores, from the files of all processes in this
        object's directory, and mark the evaluation as used. Files that others than this user may
        have written, or that cannot be read, are ignored.

        `num_scored` has, for each batch, the number of scored tokens of each request. A file is
        read up to the first record that is wrong or has another number of tokens.
        """
        stored: dict[int, Scores] = {}
        for path in sorted(self._directory.glob(f"*{SUFFIX}")):
            try:
                status = path.lstat()
                if (
                    not stat.S_ISREG(status.st_mode)
                    or status.st_uid != os.geteuid()
                    or status.st_mode & WRITABLE
                ):
                    continue
                stored |= _parse(path.read_bytes(), num_scored, self._directory.name)
                os.utime(self._directory)
            except OSError:
                continue
        return stored

    def add(self, batch: int, scores: Scores) -> None:
        """Append `scores`, the Scores of the batch with the number `batch`, to this process's own
        file, where they outlive the process and the method `read` finds them. The first call makes
        the file. If the file cannot be written, the scores are not kept, and no error is raised."""
        body = scores.log_probabilities.astype("<f8").tobytes() + b"".join(map(bytes, scores[1:-1]))
        lengths = struct.pack("<II", batch, len(scores.greedy))
        record = lengths + _digest(self._directory.name, lengths + body) + body
        with suppress(OSError):
            if self._file is None:
                self._directory.mkdir(parents=True, exist_ok=True)
                # A file for each process, so that writers need no lock; unbuffered, so that a batch
                # is with the system before the next one is computed.
                handle, _ = tempfile.mkstemp(suffix=SUFFIX, dir=self._directory)
                self._file = os.fdopen(handle, "wb", buffering=0)
            self._file.write(record)


Store = Callable[[JSON], closing[StoredScores]]
"""Function that opens an evaluation's stored scores, given its settings as a dict: `open_scores`
for one checkpoint and tokenizer. It returns a context manager that yields a StoredScores."""


def open_scores(
    folder: Path, checkpoint: str, tokenizer: str, settings: JSON
) -> closing[StoredScores]:
    """Return a context manager that yields the StoredScores of an evaluation and closes them. Its
    directory in `folder` is named by a digest of three things: the checkpoint's digest, the
    tokenizer's digest, and the JSON `settings` of everything else that decides the scores' bits."""
    facts = {"checkpoint": checkpoint, "tokenizer": tokenizer, **settings}
    return closing(StoredScores(folder / sha256_json(facts)[:32]))


def remove_oldest(folder: Path, largest_bytes: int = LARGEST_BYTES) -> None:
    """Remove the directories of the least recently used evaluations from `folder` until at most
    `largest_bytes` of stored scores remain; the most recently used one always stays."""
    used = []
    for directory in folder.iterdir():
        try:
            size = sum(file.stat().st_size for file in directory.glob(f"*{SUFFIX}"))
            used.append((directory.stat().st_mtime, size, directory))
        except OSError:
            continue
    total = sum(size for _, size, _ in used)
    # The most recently used evaluation stays, however large it is.
    for _, size, directory in sorted(used)[:-1]:
        if total <= largest_bytes:
            return
        shutil.rmtree(directory, ignore_errors=True)
        total -= size


def _digest(evaluation: str, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16, key=evaluation.encode()).digest()


def _parse(data: bytes, num_scored: Sequence[Tokens], evaluation: str) -> dict[int, Scores]:
    """Return a dict number of a batch → its Scores, from `data`, the bytes of a file of records, up
    to the first record that is wrong, incomplete, of an unknown batch or with another number of
    tokens than its batch has. `num_scored` has, for each batch, an array of the number of scored
    tokens of each request; the Scores get this array too. `evaluation` is the name of the directory
    that the file is in; each record's digest covers this name."""
    parsed = {}
    start = 0
    while start + HEADER.size <= len(data):
        batch, count, checksum = HEADER.unpack_from(data, start)
        first = start + HEADER.size
        end = first + BYTES_PER_TOKEN * count
        body = data[first:end]
        if end > len(data) or _digest(evaluation, data[start : start + 8] + body) != checksum:
            break
        if batch >= len(num_scored) or count != num_scored[batch].sum():
            break
        flags = np.frombuffer(body, np.bool_, 2 * count, 8 * count).reshape(2, count)
        parsed[batch] = Scores._make([np.frombuffer(body, "<f8", count), *flags, num_scored[batch]])
        start = end
    return parsed
