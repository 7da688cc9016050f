"""Lines of files that may be hostile: in bounded memory, whatever their length and however they were compressed."""

import bz2
import gzip
import io
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from lineage.atomic import parse_json

CHUNK_BYTES = 1 << 20
COMPRESSIONS = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"BZh": ".bz2", b"\xfd7zXZ": ".xz"}
"""First bytes of compressed files, with the usual ending of their names."""


def compression(path: Path) -> str:
    """The kind of compression as the ending of a name, told by content; by the ending where the content is no kind."""
    with path.open("rb") as file:
        head = file.read(8)
    ending = path.suffix.lower() if path.suffix.lower() in COMPRESSIONS.values() else ""
    return next((kind for magic, kind in COMPRESSIONS.items() if head.startswith(magic)), ending)


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed."""
    kind = compression(path)
    if kind == ".zst":
        import pyarrow

        with path.open("rb", CHUNK_BYTES) as file:
            yield io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "rb"), "zstd"), CHUNK_BYTES)
        return
    plain = partial(Path.open, buffering=CHUNK_BYTES)
    opened: Any = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(kind, plain)
    with opened(path, "rb") as file:
        yield file


def read_lines(stream: BinaryIO, max_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Lines with their lengths in bytes, newline included. A line of more than `max_bytes` is cut."""
    while line := stream.readline(max_bytes + 1):
        length = len(line)
        if length > max_bytes and not line.endswith(b"\n"):
            line = line[:CHUNK_BYTES]
            while rest := stream.readline(CHUNK_BYTES):
                length += len(rest)
                if rest.endswith(b"\n"):
                    break
        yield line, length


def seek_line(file: BinaryIO, start: int, end: int) -> int | None:
    """Move to the first line that begins in `[start, end)` and return its position, None if there is none."""
    if start == 0:
        return 0 if end else None
    position = start - 1
    file.seek(position)
    while position < end - 1 and (chunk := file.readline(CHUNK_BYTES)):
        position += len(chunk)
        if chunk.endswith(b"\n"):
            return position if position < end else None
    return None


def parse_line(line: bytes) -> Any:
    """The JSON value of a line. `json` accepts lone surrogates and explains errors better than orjson."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return parse_json(line.decode("utf-8").removeprefix("\ufeff"))
