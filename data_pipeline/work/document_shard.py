"""The documents of one shard on disk: JSON lines, and the start of each line."""

import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
import orjson

from mlm_repro.data_pipeline.document import Document, json_line

LINES = "documents.jsonl"
STARTS = "documents.npy"
BUFFER_BYTES = 1 << 18


class DocumentWriter:
    """Context manager that writes a shard of documents, each given to `append`, into a directory
    that exists: `documents.jsonl`, their JSON lines, and `documents.npy`, the byte at which each
    line starts, then the size of the file. Both are complete when the block ends. `len` is the
    number of documents so far."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._starts = array("q", [0])

    def __enter__(self) -> Self:
        self._file = (self._directory / LINES).open("wb", BUFFER_BYTES)
        return self

    def append(self, document: Document) -> None:
        """Write a document as one JSON line at the end of the shard's file, and note the byte at
        which the next line starts."""
        line = json_line(document.to_json())
        self._file.write(line)
        self._starts.append(self.end + len(line))

    @property
    def end(self) -> int:
        """Number of bytes of JSON lines written so far, at which the next document starts."""
        return self._starts[-1]

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __exit__(self, *error: object) -> None:
        self._file.close()
        np.save(self._directory / STARTS, np.array(self._starts))


class DocumentShard:
    """The documents in a directory that a DocumentWriter wrote. A loop, one at a time, reads the
    Documents in order; `shard[number]` reads one by its number, from 0, which the caller keeps
    below the number of documents. The attribute `starts` has one entry more than there are
    documents; there is no `len`."""

    def __init__(self, directory: Path) -> None:
        self.starts = np.asarray(np.load(directory / STARTS, mmap_mode="r"))
        """Byte at which each line starts, then the size of the file, [documents + 1]."""
        self._file = (directory / LINES).open("rb", BUFFER_BYTES)

    def __getitem__(self, number: int) -> Document:
        start, end = self.starts[number : number + 2].tolist()
        return Document(**orjson.loads(os.pread(self._file.fileno(), end - start, start)))

    def __iter__(self) -> Iterator[Document]:
        self._file.seek(0)
        return (Document(**orjson.loads(line)) for line in self._file)
