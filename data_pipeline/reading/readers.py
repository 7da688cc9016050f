"""Reads the documents in a piece of a file, names malformed input, and cuts sources off at a limit."""

import json
import os
import re
import resource
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_pipeline.document import Document, Malformed, size_bytes
from data_pipeline.reading.lines import ALLOWED_BYTES, TooCompressed, open_bytes, parse_line, read_lines, seek_line
from data_pipeline.reading.pieces import Piece, stamp_of
from lineage.errors import BadInput, Interrupted

os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # pyarrow's own sets 1 GB aside, which hides what is taken
EXCERPT_CHARACTERS = 300
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
BATCH_ROWS = 64
SPARE_BYTES = 256 << 20
"""Memory allowed beyond four times the unpacked size that a table states."""
ROW_BYTES = 4
"""Bytes counted for a row of Parquet beside its text: the length field."""
EXPANDS = "expands more than {:g} times, the rest is not read"
AGAIN = "the same command reads it again, and what was finished of other files is kept"

Item = Document | Malformed | None
"""A document, malformed input, or None for a blank line."""


@dataclass(frozen=True)
class Limits:
    """Largest line, and largest expansion of a compressed file."""

    max_line_bytes: int = 256 << 20
    max_ratio: float = 200.0


class Limit:
    """Admits documents until one would exceed a number of documents or of UTF-8 bytes."""

    def __init__(self, max_documents: int | None, max_bytes: int | None) -> None:
        self._max_documents, self._max_bytes = max_documents, max_bytes
        self.documents = self.bytes = 0
        self.reached = False
        """True once a document was refused."""

    def admits(self, document_bytes: int) -> bool:
        """True if a document of this size is within the limits; it is then counted."""
        documents, total_bytes = self.documents + 1, self.bytes + document_bytes
        over = self._max_documents is not None and documents > self._max_documents
        if over or (self._max_bytes is not None and total_bytes > self._max_bytes):
            self.reached = True
            return False
        self.documents, self.bytes = documents, total_bytes
        return True


def read_pieces(pieces: Iterable[Piece], limits: Limits) -> Iterator[Item]:
    """All items of the pieces, in order.

    Raises BadInput for a file that cannot be read, Interrupted for one that was changed or removed meanwhile.
    """
    for piece in pieces:
        read = {"parquet": _read_parquet, "text": _read_text}.get(piece.kind, _read_lines)
        taken = 0
        try:
            _check_stamp(piece)
            for item in read(piece, limits):
                yield item
                taken += isinstance(item, Document)
                if taken == piece.take:
                    break
            _check_stamp(piece)
        except (OSError, EOFError, zlib.error) as error:
            if piece.stamp and isinstance(error, OSError) and error.errno:  # it was read once, for its digest
                raise Interrupted(f"{piece.path} can no longer be read ({error.strerror}); {AGAIN}") from error
            raise BadInput(f"{piece.path} cannot be read: {error}") from error


def _check_stamp(piece: Piece) -> None:
    if piece.stamp and stamp_of(Path(piece.path)) != piece.stamp:
        raise Interrupted(f"{piece.path} was changed while it was read; {AGAIN}")


def pieces_within(limit: Limit, pieces: Iterable[Piece], limits: Limits) -> Iterator[Piece]:
    """The pieces up to the first document that the limit does not admit; they are read once for their sizes."""
    for piece in pieces:
        take = 0
        for item in read_pieces([piece], limits):
            if isinstance(item, Document):
                if not limit.admits(size_bytes(item.text)):
                    if take:
                        yield replace(piece, take=take)
                    return
                take += 1
        yield piece


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


def _read_lines(piece: Piece, limits: Limits) -> Iterator[Item]:
    number = piece.before
    with open_bytes(Path(piece.path), limits.max_ratio) as file:
        position = 0
        if piece.end:
            first_line = seek_line(file, piece.start, piece.end)
            if first_line is None:
                return
            position, number = first_line, piece.before + (first_line > piece.start)
        try:
            for line, length in read_lines(file, limits.max_line_bytes):
                number += 1
                if length - line.endswith(b"\n") > limits.max_line_bytes:
                    yield malformed(piece.name, number, f"longer than {limits.max_line_bytes:,} bytes", line)
                else:
                    yield _parse(piece, number, line.strip())
                position += length
                if piece.end and position >= piece.end:
                    return
        except TooCompressed:
            yield malformed(piece.name, number + 1, EXPANDS.format(limits.max_ratio), b"")


def _parse(piece: Piece, number: int, line: bytes) -> Item:
    if not line:
        return None
    try:
        value = parse_line(line)
        if piece.kind == "harvest" and "text" not in value:
            return Malformed(**value)
        text = _text_of(value)
    except UnicodeDecodeError as error:
        return malformed(piece.name, number, f"invalid UTF-8 at byte {error.start}", line)
    except json.JSONDecodeError as error:
        return malformed(piece.name, number, f"not JSON: {error.msg} at character {error.pos}", line)
    except ValueError as error:
        return malformed(piece.name, number, str(error), line)
    own = value.get("id") if piece.kind != "jsonl" else None
    return Document(mend_surrogates(own) if isinstance(own, str) else f"{piece.name}:{number}", text)


def _text_of(value: object) -> str:
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    if "text" not in value:
        raise ValueError("no text")
    text = value["text"]
    if not isinstance(text, str):
        raise ValueError("text is not a string")
    return text if text.isascii() else mend_surrogates(text)


def _read_parquet(piece: Piece, limits: Limits) -> Iterator[Item]:
    import pyarrow
    from pyarrow import parquet

    number = piece.before
    try:
        with parquet.ParquetFile(piece.path, read_dictionary=["text"]) as table:  # what is repeated is in memory once
            numbers = range(piece.start, piece.end)
            groups = [table.metadata.row_group(group) for group in numbers]
            file_bytes = Path(piece.path).stat().st_size
            said = sum(group.total_byte_size for group in groups)
            share = sum(map(compressed_bytes, groups)) / file_bytes
            room = share * max(ALLOWED_BYTES, limits.max_ratio * file_bytes)
            if said > room:
                yield malformed(piece.name, number + 1, EXPANDS.format(limits.max_ratio), b"")
                return
            batches = table.iter_batches(batch_size=BATCH_ROWS, row_groups=numbers, columns=["text"])
            while (batch := _next_within(SPARE_BYTES + 4 * max(said, 0), batches)) is not None:
                for value in batch.column(0):
                    number += 1
                    item = _parquet_value(piece.name, number, value, limits)
                    room -= ROW_BYTES + (size_bytes(item.text) if isinstance(item, Document) else 0)
                    if room < 0:
                        yield malformed(piece.name, number, EXPANDS.format(limits.max_ratio), b"")
                        return
                    yield item
    except pyarrow.ArrowMemoryError as error:
        raise BadInput(f"{piece.path} needs more memory than its table says") from error
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise BadInput(f"{piece.path} is not a readable Parquet file: {error}") from error


def _next_within(size: int, batches: Iterator[Any]) -> Any:
    """The next batch, read within `size` more bytes of memory; None after the last.

    A page is unpacked whole and may have 2 GB, whatever the table states.
    """
    taken = Path("/proc/self/statm")
    if not taken.exists():
        return next(batches, None)
    most = int(taken.read_text(encoding="ascii").split()[5]) * resource.getpagesize() + size
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most if before[0] < 0 else min(most, before[0]), before[1]))
    try:
        return next(batches, None)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def compressed_bytes(group: Any) -> int:
    """Bytes of a Parquet file that a row group says it fills."""
    return sum(max(group.column(number).total_compressed_size, 0) for number in range(group.num_columns))


def _parquet_value(name: str, number: int, value: Any, limits: Limits) -> Item:
    try:
        text = _text_of({"text": value.as_py()})
    except UnicodeDecodeError as error:
        return malformed(name, number, f"invalid UTF-8 at byte {error.start}", b"")
    except ValueError as error:
        return malformed(name, number, str(error), str(value.as_py()).encode("utf-8", "replace"))
    if len(text) > limits.max_line_bytes:
        return malformed(name, number, f"longer than {limits.max_line_bytes:,} bytes", text[:1000].encode())
    return Document(f"{name}:{number}", text)


def _read_text(piece: Piece, limits: Limits) -> Iterator[Item]:
    path = Path(piece.path)
    with path.open("rb") as file:
        content = file.read(limits.max_line_bytes + 1)
    yield text_document(piece.name, content, limits)


def text_document(name: str, content: bytes, limits: Limits) -> Document | Malformed:
    """A document from a file's content, of which at most one byte more than the limit was read."""
    if len(content) > limits.max_line_bytes:
        return malformed(name, 1, f"longer than {limits.max_line_bytes:,} bytes", content)
    try:
        return Document(name, content.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        return malformed(name, line, f"invalid UTF-8 at byte {error.start}", content)
