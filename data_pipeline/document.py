"""A document, or the reason it was dropped."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import orjson

ROWS = 1000
"""Number of documents that are read from or written to a table at a time."""


@dataclass(frozen=True, slots=True)
class Document:
    """Document of a corpus: its `text`, and an `id` that tells people where it is from. If the id
    does not, the text `source`, else empty, gives its file and line; `metadata` is a dict of
    further keys that the recipe keeps, or None. No stage's decision depends on the id."""

    id: str
    text: str
    source: str = ""
    """File and line that the document was read from, if the id does not give them; else empty."""
    metadata: dict[str, Any] | None = None
    """Dict of the other keys of the document's line that the recipe keeps, with their values; None
    if there are none."""

    def to_json(self) -> dict[str, Any]:
        """Return the document as a dict for JSON: `id` and `text`, and `source` and `metadata` if
        they are not empty."""
        more = {"source": self.source, "metadata": self.metadata}
        return {"id": self.id, "text": self.text} | {
            name: value for name, value in more.items() if value
        }


@dataclass(frozen=True, slots=True)
class Drop:
    """A stage's decision to drop a document, which a filter returns. Dropped documents are counted
    by `reason`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """Record of a line, row or file that no document can be made of, or of a document that a filter
    found unfit: `source`, the file's name or the document's id; `line`, the number of the line or
    row, 1 for a document, 0 for a damaged file; the reason; and `excerpt`, the first characters, if
    there are any. It is no exception: readers yield it in the place of a document, and a build sets
    it aside and goes on, unless the recipe allows fewer of them."""

    source: str
    line: int
    """Line number from 1; 0 for the damage of a whole file."""
    reason: str
    excerpt: str


def written_documents(path: Path) -> Iterator[Document]:
    """Yield the documents, as Documents, of the file `path` of a dataset, in order: it has JSON
    lines if its name ends in `.jsonl`, else a Parquet table with the metadata as JSON text."""
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
    """Write the documents of `files`, JSON lines files of a dataset, in order as one Parquet table
    at `path`. Its columns are the texts `id`, `text`, `source` and, as JSON, `metadata`; an empty
    source or metadata is null."""
    import pyarrow
    from pyarrow import parquet

    schema = pyarrow.schema(
        {name: pyarrow.string() for name in ("id", "text", "source", "metadata")}
    )
    with parquet.ParquetWriter(path, schema, compression="zstd") as table:
        documents = chain.from_iterable(map(written_documents, files))
        rows = (document.to_json() for document in documents)
        while batch := [*islice(rows, ROWS)]:
            for row in batch:
                if "metadata" in row:
                    row["metadata"] = orjson.dumps(row["metadata"]).decode()
            table.write_batch(pyarrow.RecordBatch.from_pylist(batch, schema))


class Unfit(Exception):
    """Raised by a filter for a text that it cannot treat in reasonable time; the document goes to
    quarantine."""


def json_line(value: Any) -> bytes:
    """Return a JSON value, or a dataclass, as a line of JSON in UTF-8, newline included."""
    return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)


def size_bytes(text: str) -> int:
    """Return the length of the text in UTF-8, in bytes. Raises UnicodeEncodeError for a lone
    surrogate."""
    return len(text) if text.isascii() else len(text.encode("utf-8"))
