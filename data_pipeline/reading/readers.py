"""Reads the documents in a piece of a file, names malformed input, and cuts sources off at a
limit."""

import csv
import io
import json
import lzma
import os
import re
import sys
import zlib
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
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

# pyarrow's own pool reserves 1 GB, which hides the memory that a table really takes.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
EXCERPT_CHARACTERS = 300
NAMES = 5
"""Largest number of a document's keys that an error names if the text's key is missing."""
NAME_CHARACTERS = 20
"""Number of characters to which an error about a missing text key cuts each of the keys that it
names."""
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
BATCH_ROWS = 64
LONG_INTEGER = re.compile(rb"\d{19}")
MAX_DEPTH = 240
"""Largest number of levels of metadata; orjson writes 254 levels of a whole line."""
ARROW_FILE = b"ARROW1"
"""First bytes of Arrow's file format."""
MAX_LINE_BYTES = 256 << 20
"""Largest number of bytes of a line or text file, and of characters of a text in a table, CSV file
or archive, that is read as a document, if a recipe sets no other."""
BYTES = "surrogateescape"
"""Error handler by which bytes that are not UTF-8 pass through a text."""
GO_ON = (
    "; replace it, or set sources.max_bad_files to the number of such files whose rest a build may"
    " leave out"
)

Row = JSON | str
"""A dict of a row's fields by the names of their columns or, as a text, the reason why the row is
not a document."""
Item = Document | Malformed | None
"""A Document, a Malformed for malformed input, or None for a blank line."""


class Damaged(BadInput):
    """Raised, as a kind of BadInput, if an input file cannot be read to its end. If the build goes
    on without the rest, the message is written to the quarantine."""


class Limit:
    """Counter whose method `admits` returns True for a document that is within a largest number of
    documents and of their texts' UTF-8 bytes, together with the ones admitted before; a limit that
    is None does not count. Malformed input and blank lines are always admitted and not counted.
    After a document that was too long, a shorter one may be admitted; the attribute `reached` is
    True once one was refused, `documents` and `bytes` count the admitted ones."""

    def __init__(self, max_documents: int | None, max_bytes: int | None) -> None:
        self._max_documents = max_documents
        self._max_bytes = max_bytes
        self.documents = self.bytes = 0
        self.reached = False
        """True once a document was refused."""

    def admits(self, item: Item) -> bool:
        """Return True and count `item`, a document, if with the ones counted before it is within
        the limits on the number of documents and on their texts' UTF-8 bytes. Else set the
        attribute `reached` to True and return False; a shorter document may be admitted after it.
        Return True for malformed input and blank lines, which do not count."""
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
    """Yield the documents, malformed input and blank lines (None) of the pieces, in order, of each
    up to its `take` documents. A line or text file of more than `max_line_bytes`, or such a text in
    a table, CSV file or WARC archive, is malformed input.

    Raises Damaged, a BadInput, if a file cannot be read to its end; Interrupted if a file with a
    stamp was changed or removed meanwhile; ExtraMissing if a library that its format or address
    needs is missing; and for remote files the errors of Remote.
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
            # A file with a stamp was read once already, for its digest: it is not damaged.
            if piece.stamp and isinstance(error, OSError) and error.errno:
                raise Interrupted(
                    f"the input file {piece.path} can no longer be read ({error.strerror}): restore"
                    " it and run the same command again, which keeps what was finished of other"
                    " files"
                ) from error
            raise Damaged(
                f"the input file {piece.path} cannot be read to its end: {error}{GO_ON}"
            ) from error


def _read_rows(piece: Piece, max_line_bytes: int) -> Iterator[Item]:
    """Yield the documents and malformed rows of `piece`, an Arrow table, a CSV file, a WARC archive
    or row groups of a Parquet table, in order; a text of more than `max_line_bytes` bytes is
    malformed. Raises Damaged for content that its library cannot read; errors of reading and
    decompressing the file, and UserErrors, are passed on."""
    try:
        for number, row in {"csv": _csv_rows, "warc": _warc_rows}.get(piece.kind, _table_rows)(
            piece
        ):
            item = (
                malformed(piece.name, number, row, b"")
                if isinstance(row, str)
                else _parse(piece, number, b"", row)
            )
            if isinstance(item, Document) and size_bytes(item.text) > max_line_bytes:
                reason = f"longer than {max_line_bytes:,} bytes"
                item = malformed(piece.name, number, reason, item.text[:1000].encode())
            yield item
    except (OSError, EOFError, zlib.error, lzma.LZMAError, UserError):
        raise
    except Exception as error:  # libraries of tables and archives have errors of their own
        raise Damaged(
            f"the input file {piece.path} cannot be read as {piece.kind}: {error}{GO_ON}"
        ) from error


def _csv_rows(piece: Piece) -> Iterator[tuple[int, Row]]:
    """Yield a pair for each row of the CSV file of `piece`, below the names of its columns: the
    number of the line at which the row ends, from 1, and a dict of its fields by column, or a text
    that says why it is malformed if it has too many fields. Fields are texts, None where the row is
    too short, with lone surrogates for invalid UTF-8. The field in the column `piece.text_key` is
    bytes, which are not checked, and empty where the row is too short. A file with `.tsv` in its
    name has tabs between columns. Raises csv.Error for a field with wrong quotes."""
    delimiter = "\t" if ".tsv" in piece.path.lower().rpartition("/")[2] else ","
    # csv refuses fields of over 128 kB, and a text may be longer; `_read_rows` checks its length.
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
    """Yield a pair for each document of the WARC archive that `piece` names, in order: the
    document's number among all records, from 1, and a dict of its headers and, as bytes under the
    `text_key` of `piece`, its plain text, as in Common Crawl's WET files. For a document of another
    content type the dict is replaced by a text, the reason why it is not read; other records, such
    as requests, are counted and skipped. Raises EOFError for an archive that is cut off,
    ExtraMissing without the library warcio, and the errors of that library."""
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
                    row if kind.startswith("text/plain") else f"{kind}, whose text is not read",
                )
        file.read(1)  # raises EOFError for a cut file, which the library takes for its end


def is_table(piece: Piece) -> bool:
    """Return True if the piece is of a Parquet or Arrow table: by its kind or, for a file of a
    dataset, by its name."""
    return piece.kind in ("parquet", "arrow") or (
        piece.kind == "documents" and piece.path.endswith(".parquet")
    )


def _check_stamp(piece: Piece) -> None:
    if piece.stamp and stamp_of(place_of(piece.path)) != piece.stamp:
        raise Interrupted(
            f"the input file {piece.path} was changed while it was read, and changed content makes"
            " another dataset: run the command again when the file stays as it is, and with a verb"
            " name another OUT, because this one is for the file as it was"
        )


def read_sound(
    pieces: Iterable[Piece], max_line_bytes: int, goes_on: bool, damaged: list[str]
) -> Iterator[Item]:
    """Yield what `read_pieces` yields of the pieces. With `goes_on`, a piece of a damaged file ends
    at the damage: a sentence on it is appended to `damaged`, a Malformed with line 0 is yielded,
    and the next piece is read. Without, Damaged is raised. The other errors of `read_pieces`, such
    as Interrupted for a changed file, are raised either way."""
    for piece in pieces:
        try:
            yield from read_pieces([piece], max_line_bytes)
        except Damaged as error:
            if not goes_on:
                raise
            damaged.append(str(error).removesuffix(GO_ON))
            yield Malformed(piece.name, 0, damaged[-1], "")


def check_damaged(damaged: Sequence[str], limit: int) -> None:
    """Print to standard error one warning with all sentences of `damaged`, or nothing if it is
    empty. `damaged` has a sentence for each damaged piece, as `read_sound` writes it, with the file
    before " cannot be read "; several sentences on one file count as one file. If more files than
    `limit`, the recipe's `max_bad_files`, are damaged, nothing is printed and BadInput is
    raised."""
    if damaged:
        files = {sentence.partition(" cannot be read ")[0] for sentence in damaged}
        summary = f"{len(files)} of the files are damaged: {'; '.join(damaged)}"
        if len(files) > limit:
            raise BadInput(
                f"{summary}; sources.max_bad_files = {limit} allows fewer: replace the damaged"
                " files, or raise that number to leave out the text after the damage"
            )
        print(f"warning: {summary}; the text after the damage is left out", file=sys.stderr)


def pieces_within(
    limit: Limit, pieces: Iterable[Piece], max_line_bytes: int, goes_on: bool = False
) -> Iterator[Piece]:
    """Yield `pieces`, the Pieces of a source, in order, up to the first document that `limit`, a
    Limit, refuses. Each piece is read here before it is yielded, and its documents are counted in
    `limit`. The piece with the refused document is the last: a copy is yielded whose `take` is the
    number of its documents before that one; if that number is 0, the piece is left out.

    With `goes_on`, a piece of a damaged file is read up to the damage, and the next piece follows;
    without, Damaged is raised. The other errors of `read_pieces`, which gets `max_line_bytes`, are
    raised either way.
    """
    for piece in pieces:
        before = limit.documents
        if all(map(limit.admits, read_sound([piece], max_line_bytes, goes_on, []))):
            yield piece
            continue
        if take := limit.documents - before:
            yield replace(piece, take=take)
        return


def mend_surrogates(text: str) -> str:
    """Return the text with U+FFFD in place of each lone surrogate, which no encoding can write, as
    ftfy does."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return LONE_SURROGATE.sub("\ufffd", text)
    return text


def malformed(name: str, line: int, reason: str, content: bytes) -> Malformed:
    """Return a Malformed: the name of the input's file, its line, the reason, and as excerpt the
    first EXCERPT_CHARACTERS characters of the bytes `content`."""
    excerpt = content[: 4 * EXCERPT_CHARACTERS].decode("utf-8", "replace")[:EXCERPT_CHARACTERS]
    return Malformed(name, line, reason, excerpt)


def _read_lines(piece: Piece, max_line_bytes: int) -> Iterator[Item]:
    """Yield a Document or a Malformed for each line that begins in the piece, in order, and None
    for each blank line. A line of more than `max_line_bytes` is malformed. Errors of reading and
    decompressing are passed on."""
    number = piece.before
    is_framed = piece.is_inside is not None
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
    """Return a Document of `line`, JSON in bytes, or of `row` if one is given, by the keys in
    `piece`; or a Malformed with the reason if that is not possible. `number` is the line's or row's
    number in the file. A harvested line may also be a stored Malformed, which is returned."""
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
        # orjson turns an integer of over 64 bits into a float; parse_json keeps it.
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
    """Return the Document of a line or a row with the number `number` in its file; `value` is its
    JSON value, and `piece` has the keys of the text, the id and the metadata. A line without an id
    that is a text, not empty, or a number gets the piece's name and `number` as its id; another
    line has these as its source. A line of the kinds `documents` and `harvest` has its own `id`,
    `source` and `metadata` instead, with `piece.owner` before the id if there is one; metadata in a
    text is read as JSON.

    Raises ValueError if `value` is not an object, has no text, or has metadata that is nested too
    deeply or is a text but not JSON; UnicodeDecodeError if the text is in bytes that are not UTF-8.
    """
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    text = _value(value, piece.text_key)
    position = f"{piece.name}:{number}"
    if text is None and piece.text_key not in value:
        others = ", ".join(name[:NAME_CHARACTERS] for name in list(value)[:NAMES])
        raise ValueError(
            f"no {piece.text_key}, the key of the text" + (f", but {others}" if others else "")
        )
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    if not isinstance(text, str):
        raise ValueError(f"{piece.text_key} is not a string, as the text of a document must be")
    text = text if text.isascii() else mend_surrogates(text)
    if piece.kind in ("documents", "harvest"):
        own_id = value.get("id")
        mended = mend_surrogates(own_id) if isinstance(own_id, str) else position
        mended = f"{piece.owner}:{mended}" if piece.owner else mended
        metadata = value.get("metadata")
        # A table holds metadata as JSON text, a JSON line as an object.
        metadata = parse_json(metadata) if isinstance(metadata, str) else metadata
        return Document(mended, text, str(value.get("source") or ""), metadata)
    own_id = _value(value, piece.id_key) if piece.id_key else None
    values = {key: _value(value, key) for key in piece.keep}
    wanted = {key: inner for key, inner in values.items() if inner is not None}
    metadata = plain(wanted) if wanted else None
    if isinstance(own_id, bool) or not isinstance(own_id, (str, int, float)) or own_id == "":
        return Document(position, text, metadata=metadata)
    return Document(mend_surrogates(str(own_id)), text, position, metadata)


def plain(value: Any, depth: int = 0) -> Any:
    """Return a copy of a value that orjson can write as JSON: keys, dates and other objects become
    texts, tuples lists, and each half of a surrogate pair U+FFFD.

    A whole number of more than 64 bits becomes its digits. Bytes become their text, or a `data:`
    URL (RFC 2397) if they are not UTF-8. Raises ValueError for nesting deeper than MAX_DEPTH
    levels, of which `depth` enclose the value.
    """
    if depth > MAX_DEPTH:
        raise ValueError(
            f"metadata is nested deeper than {MAX_DEPTH} levels in a key that sources.metadata"
            " names: to keep the document, take the key out of that setting"
        )
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
    """Return the value under `key` in a row or, if it has no such key, under the key's dotted
    steps, such as `text` in the object `body` for `body.text`; None if the row lacks it."""
    inner: Any = row
    for step in [key] if key in row else key.split("."):
        inner = inner.get(step) if isinstance(inner, dict) else None
    return inner


def _table_rows(piece: Piece) -> Iterator[tuple[int, Row]]:
    number = piece.before
    for batch in _batches(piece):
        for index in range(batch.num_rows):
            number += 1
            yield number, {name: batch.column(name)[index] for name in batch.schema.names}


def table_bytes(path: str) -> Any:
    """Open the file of a table for reading, and return it as a binary file, which the caller
    closes. `path` is the text of a path, whose file is mapped into memory, or an address with
    `://`. Raises OSError if a local file cannot be opened; a remote file raises the errors of
    Remote, when it is opened or read."""
    import pyarrow

    file = place_of(path)
    return file.open("rb") if isinstance(file, Remote) else pyarrow.memory_map(path)


def _batches(piece: Piece) -> Iterator[Any]:
    """Yield pyarrow's record batches of at most BATCH_ROWS rows, in order, with only the columns
    that documents are made from: of the row groups in the piece's range of a Parquet table, no
    batches if the range is empty, or of a whole Arrow table."""
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
    """Return the schema of a table and an iterator of its record batches, from the open binary file
    of a table in Arrow's stream format, which `save_to_disk` writes, or in its file format. The
    file must be at its start, and stay open until the batches are read. Raises pyarrow's errors,
    such as ArrowInvalid, for other content, also while the batches are read."""
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
    """Return a Document from `content`, a text file's bytes, with `name` as its id, or a Malformed
    if it is longer than `max_line_bytes` or not UTF-8. At most one byte more than the limit need be
    given."""
    if len(content) > max_line_bytes:
        return malformed(name, 1, f"longer than {max_line_bytes:,} bytes", content)
    try:
        return Document(name, content.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        return malformed(name, line, f"invalid UTF-8 at byte {error.start}", content)
