"""The documents of all measured shards by their number in the corpus."""

import os
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from data_pipeline.config import DeduplicateConfig
from data_pipeline.document import Document
from data_pipeline.duplicates.lsh import WORD_BYTES, fingerprint_words
from data_pipeline.passes.measure import FINGERPRINTS, NUMBERS
from data_pipeline.work.document_shard import DocumentShard

OPEN_SHARDS = 128


class Corpus:
    """Long documents, those of the first shard first; `starts` [shards + 1] are the numbers at which shards begin."""

    def __init__(self, prepared: Path, measured: Path, starts: NDArray[np.int64]) -> None:
        self._prepared, self._measured, self._starts = prepared, measured, starts
        self._shard = lru_cache(OPEN_SHARDS)(self._open_shard)
        self._fingerprints = lru_cache(OPEN_SHARDS)(self._open_fingerprints)

    def place(self, number: int) -> tuple[int, int]:
        """Shard and number in the shard."""
        shard = int(np.searchsorted(self._starts, number, side="right")) - 1
        return shard, number - int(self._starts[shard])

    def __getitem__(self, number: int) -> Document:
        shard, place = self.place(number)
        documents, numbers = self._shard(shard)
        return documents[int(numbers[place])]

    def text(self, number: int) -> str:
        """Text of a document."""
        return self[number].text

    def fingerprints(self, numbers: NDArray[np.int64], config: DeduplicateConfig) -> NDArray[np.uint64]:
        """Fingerprints of documents, [documents, words]."""
        size = WORD_BYTES * fingerprint_words(config)
        rows = []
        for number in numbers:
            shard, place = self.place(int(number))
            rows.append(os.pread(self._fingerprints(shard).fileno(), size, size * place))
        return np.frombuffer(b"".join(rows), np.uint64).reshape(len(rows), -1)

    def _open_shard(self, shard: int) -> tuple[DocumentShard, NDArray[np.int64]]:
        name = f"{shard:05d}"
        return DocumentShard(self._prepared / name), np.load(self._measured / name / NUMBERS, mmap_mode="r")

    def _open_fingerprints(self, shard: int) -> BinaryIO:
        return (self._measured / f"{shard:05d}" / FINGERPRINTS).open("rb")
