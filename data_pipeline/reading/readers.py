"""Reads the documents in a piece of a file, names malformed input, and cuts sources off at a
limit."""

import csv
import io
import json
import lzma
import os
import re
import zlib
from base64 import b64encode
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from mlm_repro.data_pipeline.document import Document, Malformed, size_bytes
from mlm_repro.data_pipeline.reading.lines import (
    open_bytes,
    parse_line,
    read_lines,
    seek_line,
    skip_line,
)
from mlm_repro.data_pipeline.reading.pieces import Piece
from mlm_repro.data_pipeline.reading.remote import Remote, place_of
from mlm_repro.lineage.atomic import JSON, parse_json
from mlm_repro.lineage.errors import BadInput, Interrupted, UserError
from mlm_repro.lineage.extras import import_extra
from mlm_repro.lineage.remembered import stamp_of

# Pyarrow's own sets 1 GB aside, which hides what is taken.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
EXCERPT_CHARACTERS = 300
NAMES, NAME_CHARACTERS = 5, 20
"""Most keys, and most characters of each, that are named where the key of the text is not there."""
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
BATCH_ROWS = 64
LONG_INTEGER = re.compile(rb"\d{19}")
MAX_DEPTH = 240
"""Most levels of metadata; orjson writes 254 of a whole line."""
ARROW_FILE = b"ARROW1"
"""First bytes of Arrow's file format."""
MAX_LINE_BYTES = 256 << 20
"""Longest line or text file that is read, where a recipe sets no other length."""
BYTES = "surrogateescape"
"""How bytes that are no UTF-8 go through a text."""
GO_ON = "; sources.max_bad_files lets a build go on without the rest of so many files"
AGAIN = "the same command reads it again, and what was finished of other files is kept"

Row = JSON | str
"""Fields by the names of their columns, or the reason why they are no document."""
Item = Document | Malformed | None
"""A document, malformed input, or None for a blank line."""


class Damaged(BadInput):
    """A file cannot be read to its end. Where a build goes on, the sentence stands in its
    quarantine."""


class Limit:
    """Admits documents until one would exceed a number of documents or of UTF-8 bytes."""

    def __init__(self, max_documents: int | None, max_bytes: int | None) -> None:
        self._max_documents = max_documents
        self._max_bytes = max_bytes
        self.documents = self.bytes = 0
        self.reached = False
        """True once a document was refused."""

    def admits(self, item: Item) -> bool:
        """True for a document within the limits, which is then counted, and for what is no
        document."""
        if not isinstance(item, Document):
            return True
        documents = self.documents + 1
        total_bytes = self.bytes + size_bytes(item.text)
        over = self._max_documents is not None and documents > self._max_documents
        if over or (self._max_bytes is not None and total_bytes > self._max_bytes):
            self.reached = True
            return False
        self.documents = documents
        self.bytes = total_bytes
        return True


def read_pieces(pieces: Iterable[Piece], max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Item]:
    """All items of the pieces, in order.

    Raises Damaged for a file that cannot be read, Interrupted for one that was changed or removed
    meanwhile.
    """
    for piece in pieces:
        is_of_rows = is_table(piece) or piece.kind in ("csv", "warc")
        read = _read_rows if is_of_rows else _read_text if piece.kind == "text" else _read_lines
        taken = 0
        try:
            _check_stamp(piece)
            for item in read(piece, max_line_bytes):
                yield item
                taken += isinstance(item, Document)
                if taken == piece.take:
                    break
            _check_stamp(piece)
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            # It was read once, for its digest.
            if piece.stamp and isinstance(error, OSError) and error.errno:
                raise Interrupted(
                    f"{piece.path} can no longer be read ({error.strerror}); {AGAIN}"
                ) from error
            raise Damaged(f"{piece.path} cannot be read: {error}{GO_ON}") from error


def _read_rows(piece: Piece, max_line_bytes: int) -> Iterator[Item]:
    try:
        for number, row in {"csv": _csv_rows, "warc": _warc_rows}.get(piece.kind, _table_rows)(
            piece
        ):
            item = (
                malformed(piece.name, number, row, b"")
                if isinstance(row, str)
                else _parse(piece, number, b"", row)
            )
            if isinstance(item, Document) and len(item.text) > max_line_bytes:
                said = f"longer than {max_line_bytes:,} bytes"
                item = malformed(piece.name, number, said, item.text[:1000].encode())
            yield item
    except (OSError, EOFError, zlib.error, lzma.LZMAError, UserError):
        raise
    except Exception as error:  # the libraries of tables and archives raise errors of their own
        raise Damaged(f"{piece.path} is not a readable table or archive: {error}{GO_ON}") from error


def _csv_rows(piece: Piece) -> Iterator[tuple[int, Row]]:
    """Rows below the names of the columns, with the lines at which they end; a `.tsv` has tabs
    between columns."""
    delimiter = "\t" if ".tsv" in piece.path.lower() else ","
    csv.field_size_limit(1 << 62)
    with (
        open_bytes(place_of(piece.path)) as file,
        io.TextIOWrapper(file, "utf-8-sig", BYTES, newline="") as lines,
    ):
        rows = csv.DictReader(lines, delimiter=delimiter, strict=True)
        for row in rows:
            if piece.text_key in row:
                row[piece.text_key] = (row[piece.text_key] or "").encode("utf-8", BYTES)
            yield rows.line_num, "more fields than there are columns" if None in row else row


def _warc_rows(piece: Piece) -> Iterator[tuple[int, Row]]:
    """Records of plain text, as Common Crawl's WET files have them; the keys are the headers."""
    iterator = import_extra("warcio.archiveiterator", "remote").ArchiveIterator
    with open_bytes(place_of(piece.path)) as file:
        for number, record in enumerate(iterator(file), 1):
            kind = str((record.http_headers or record.rec_headers).get_header("Content-Type"))
            row = dict(record.rec_headers.headers) | {
                piece.text_key: record.content_stream().read()
            }
            if record.rec_type in ("conversion", "resource", "response"):
                yield (
                    number,
                    row if kind.startswith("text/plain") else f"{kind}, of which no text is taken",
                )
        file.read(1)  # the library takes a cut file for its end


def is_table(piece: Piece) -> bool:
    """True for a Parquet or Arrow table, which a file of a dataset may be too."""
    return piece.kind in ("parquet", "arrow") or (
        piece.kind == "documents" and piece.path.endswith(".parquet")
    )


def _check_stamp(piece: Piece) -> None:
    if piece.stamp and stamp_of(place_of(piece.path)) != piece.stamp:
        raise Interrupted(f"{piece.path} was changed while it was read; {AGAIN}")


def pieces_within(limit: Limit, pieces: Iterable[Piece], max_line_bytes: int) -> Iterator[Piece]:
    """The pieces up to the first document that the limit does not admit; they are read once for
    their sizes."""
    for piece in pieces:
        before = limit.documents
        if all(map(limit.admits, read_pieces([piece], max_line_bytes))):
            yield piece
            continue
        if take := limit.documents - before:
            yield replace(piece, take=take)
        return


def mend_surrogates(text: str) -> str:
    """Replace lone surrogates, which no encoding can write, by U+FFFD as ftfy does."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return LONE_SURROGATE.sub("\ufffd", text)
    return text


def malformed(name: str, line: int, reason: str, content: bytes) -> Malformed:
    """A record of malformed input, with its first characters."""
    excerpt = content[: 4 * EXCERPT_CHARACTERS].decode("utf-8", "replace")[:EXCERPT_CHARACTERS]
    return Malformed(name, line, reason, excerpt)


def _read_lines(piece: Piece, max_line_bytes: int) -> Iterator[Item]:
    number, is_framed = piece.before, piece.is_inside is not None
    end = piece.bytes if is_framed else piece.end
    with open_bytes(place_of(piece.path), piece.start if is_framed else 0) as file:
        position = skip_line(file, end) if piece.is_inside else 0
        number += position > 0
        if position >= end > 0:
            return
        if piece.end and not is_framed:
            first_line = seek_line(file, piece.start, piece.end)
            if first_line is None:
                return
            position = first_line
            number = piece.before + (first_line > piece.start)
        for line, length in read_lines(file, max_line_bytes):
            number += 1
            if length - line.endswith(b"\n") > max_line_bytes:
                yield malformed(piece.name, number, f"longer than {max_line_bytes:,} bytes", line)
            elif line := line.strip():
                yield _parse(piece, number, line)
            else:
                yield None
            position += length
            if end and position >= end:
                return


def _parse(piece: Piece, number: int, line: bytes, row: JSON | None = None) -> Item:
    """The document of a line, or of a row, or the reason why it is none."""
    value: Any = ""
    try:
        value = (
            parse_line(line)
            if row is None
            else {
                name: field.as_py() if hasattr(field, "as_py") else field
                for name, field in row.items()
            }
        )
        # Orjson makes a float of what has over 64 bits.
        if (piece.keep or piece.id_key) and LONG_INTEGER.search(line):
            value = parse_json(line)
        if piece.kind == "harvest" and "text" not in value:
            return Malformed(**value)
        return document_of(piece, number, value)
    except UnicodeDecodeError as error:
        reason = f"invalid UTF-8 at byte {error.start}"
    except json.JSONDecodeError as error:
        reason = f"not JSON: {error.msg} at character {error.pos}"
    except ValueError as error:
        reason = str(error)
    return malformed(piece.name, number, reason, line or str(value).encode("utf-8", "replace"))


def document_of(piece: Piece, number: int, value: object) -> Document:
    """The document of a line or a row. Raises ValueError, or UnicodeDecodeError for bytes that are
    no UTF-8."""
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    text, place = _value(value, piece.text_key), f"{piece.name}:{number}"
    if text is None and piece.text_key not in value:
        others = ", ".join(name[:NAME_CHARACTERS] for name in list(value)[:NAMES])
        raise ValueError(f"no {piece.text_key}" + (f", but {others}" if others else ""))
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    if not isinstance(text, str):
        raise ValueError(f"{piece.text_key} is not a string")
    text = text if text.isascii() else mend_surrogates(text)
    if piece.kind in ("documents", "harvest"):
        own = value.get("id")
        mended = mend_surrogates(own) if isinstance(own, str) else place
        mended = f"{piece.owner}:{mended}" if piece.owner else mended
        metadata = value.get("metadata")
        # As it is in a table.
        metadata = parse_json(metadata) if isinstance(metadata, str) else metadata
        return Document(mended, text, str(value.get("source") or ""), metadata)
    own = _value(value, piece.id_key) if piece.id_key else None
    wanted = {key: inner for key in piece.keep if (inner := _value(value, key)) is not None}
    metadata = plain(wanted) if wanted else None
    if isinstance(own, bool) or not isinstance(own, (str, int, float)) or own == "":
        return Document(place, text, metadata=metadata)
    return Document(mend_surrogates(str(own)), text, place, metadata)


def plain(value: Any, depth: int = 0) -> Any:
    """A value as JSON that orjson can write: no half of a surrogate pair, no date.

    A whole number of more than 64 bits becomes its digits, and bytes become their text, or a
    `data:` URL (RFC 2397) where they are none. Raises ValueError for nesting deeper than MAX_DEPTH.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"metadata is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict):
        return {mend_surrogates(str(key)): plain(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner, depth + 1) for inner in value]
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return f"data:;base64,{b64encode(value).decode()}"
    is_written = (
        value is None
        or isinstance(value, (bool, float))
        or (isinstance(value, int) and -(1 << 63) <= value < 1 << 64)
    )
    return value if is_written else mend_surrogates(str(value))


def _value(row: JSON, key: str) -> Any:
    """The value under a dotted key, None if there is none."""
    inner: Any = row
    for part in [key] if key in row else key.split("."):
        inner = inner.get(part) if isinstance(inner, dict) else None
    return inner


def _table_rows(piece: Piece) -> Iterator[tuple[int, Row]]:
    rows = ((batch, place) for batch in _batches(piece) for place in range(batch.num_rows))
    for number, (batch, place) in enumerate(rows, piece.before + 1):
        yield number, {name: batch.column(name)[place] for name in batch.schema.names}


def table_bytes(path: str) -> Any:
    """The bytes of a table: a file of this machine as memory."""
    import pyarrow

    place = place_of(path)
    return place.open("rb") if isinstance(place, Remote) else pyarrow.memory_map(path)


def _batches(piece: Piece) -> Iterator[Any]:
    """Few rows at a time, in the columns that are wanted."""
    from pyarrow import parquet

    columns = [piece.text_key, *([piece.id_key] if piece.id_key else []), *piece.keep]
    if piece.kind == "documents":
        columns = ["id", "text", "source", "metadata"]
    if piece.kind != "arrow":
        with table_bytes(piece.path) as file, parquet.ParquetFile(file) as table:
            groups = range(piece.start, piece.end)
            yield from table.iter_batches(batch_size=BATCH_ROWS, row_groups=groups, columns=columns)
        return
    with table_bytes(piece.path) as file:
        for batch in open_arrow(file)[1]:
            wanted = {key if key in batch.schema.names else key.split(".")[0] for key in columns}
            rows = batch.select([name for name in batch.schema.names if name in wanted])
            yield from (
                rows.slice(start, BATCH_ROWS) for start in range(0, rows.num_rows, BATCH_ROWS)
            )


def open_arrow(file: Any) -> tuple[Any, Iterator[Any]]:
    """Schema and batches of Arrow's stream format, which `save_to_disk` writes, or of its file
    format."""
    import pyarrow

    if file.read(len(ARROW_FILE)) == ARROW_FILE:
        table = pyarrow.ipc.open_file(file)
        return table.schema, map(table.get_batch, range(table.num_record_batches))
    file.seek(0)
    stream = pyarrow.ipc.open_stream(file)
    return stream.schema, stream


def _read_text(piece: Piece, max_line_bytes: int) -> Iterator[Item]:
    with place_of(piece.path).open("rb") as file:
        yield text_document(piece.name, file.read(max_line_bytes + 1), max_line_bytes)


def text_document(name: str, content: bytes, max_line_bytes: int) -> Document | Malformed:
    """A document from a file's content, of which at most one byte more than the limit was read."""
    if len(content) > max_line_bytes:
        return malformed(name, 1, f"longer than {max_line_bytes:,} bytes", content)
    try:
        return Document(name, content.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        return malformed(name, line, f"invalid UTF-8 at byte {error.start}", content)
