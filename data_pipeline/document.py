"""A document, or the reason it was dropped."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

ROWS = 1000
"""Documents that are turned into a table at a time."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text. `id` names its place for people; no code depends on it."""

    id: str
    text: str
    source: str = ""
    """File and line, where the id is not that."""
    metadata: dict[str, Any] | None = None
    """Other keys of its line that were asked for."""

    def to_json(self) -> dict[str, Any]:
        """The fields that it has."""
        more = {"source": self.source, "metadata": self.metadata}
        return {"id": self.id, "text": self.text} | {
            name: value for name, value in more.items() if value
        }


@dataclass(frozen=True, slots=True)
class Drop:
    """A stage's decision to drop a document; documents are counted by `reason`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """Input that is not a document: its place, the reason, and its first characters."""

    source: str
    line: int
    """Line number from 1."""
    reason: str
    excerpt: str


def written_documents(path: Path) -> Iterator[Document]:
    """The documents of a file of a dataset: JSON lines, or a Parquet table with the metadata as
    JSON."""
    if path.suffix == ".jsonl":
        with path.open("rb") as file:
            yield from (Document(**orjson.loads(line)) for line in file)
        return
    from pyarrow import parquet

    with parquet.ParquetFile(path) as table:
        for batch in table.iter_batches(ROWS):
            for row in batch.to_pylist():
                metadata = orjson.loads(row["metadata"]) if row["metadata"] else None
                yield Document(**row | {"source": row["source"] or "", "metadata": metadata})


def write_table(path: Path, files: Iterable[Path]) -> None:
    """Write the documents of files of JSON lines as one Parquet table."""
    import pyarrow
    from pyarrow import parquet

    schema = pyarrow.schema(
        {name: pyarrow.string() for name in ("id", "text", "source", "metadata")}
    )
    with parquet.ParquetWriter(path, schema, compression="zstd") as table:
        rows = (document.to_json() for file in files for document in written_documents(file))
        while some := [*islice(rows, ROWS)]:
            for row in some:
                if "metadata" in row:
                    row["metadata"] = orjson.dumps(row["metadata"]).decode()
            table.write_batch(pyarrow.RecordBatch.from_pylist(some, schema))


class Unfit(Exception):
    """Raised for a text that no filter can treat in reasonable time; its document goes to
    quarantine."""


def size_bytes(text: str) -> int:
    """Length of the text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8"))
