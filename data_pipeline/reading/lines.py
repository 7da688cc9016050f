"""Lines of files that may be hostile: in bounded memory, whatever their length and however they were compressed."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import zstandard

from mlm_repro.data_pipeline.reading.pieces import GRAIN_BYTES
from mlm_repro.lineage.atomic import parse_json

CHUNK_BYTES = 1 << 20
SMALL_CHUNK_BYTES = 1 << 12
COMPRESSIONS = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"BZh": ".bz2", b"\xfd7zXZ": ".xz"}
"""First bytes of compressed files, with the usual ending of their names."""


def compression(path: Path) -> str:
    """The kind of compression as the ending of a name, told by content; by the ending where the content is no kind.

    An empty file is of none.
    """
    with path.open("rb") as file:
        head = file.read(8)
    ending = path.suffix.lower() if head and path.suffix.lower() in COMPRESSIONS.values() else ""
    return next((kind for magic, kind in COMPRESSIONS.items() if head.startswith(magic)), ending)


class _Zstandard(io.RawIOBase):
    """The content of a Zstandard file; a long window takes up to 2 GiB of memory. Raises EOFError for a cut file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._rest, self._begin = file, b"", zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame: Any = self._begin.decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            if self._frame.eof:
                content, self._frame = self._frame.unused_data, self._begin.decompressobj()
            elif not (content := self._file.read(SMALL_CHUNK_BYTES)):
                raise EOFError("the file is cut off")
            if not (content := content or self._file.read(SMALL_CHUNK_BYTES)):
                return 0
            try:
                self._rest = self._frame.decompress(content)
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from error
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed."""
    with path.open("rb", CHUNK_BYTES) as file:
        yield _decompressed(file, compression(path))


def expanded_bytes(path: Path) -> int:
    """Size of a file's content; of a compressed one it is estimated from the first megabyte."""
    size, kind, content = path.stat().st_size, compression(path), 0
    if not kind:
        return size
    with path.open("rb") as file:
        head = file.read(CHUNK_BYTES)
    with suppress(OSError, EOFError, zlib.error, lzma.LZMAError):
        opened = _decompressed(io.BytesIO(head), kind)
        while chunk := opened.read(GRAIN_BYTES):
            content += len(chunk)
    return max(size, size * content // max(1, len(head)))


def _decompressed(file: Any, kind: str) -> Any:
    if kind == ".zst":
        return io.BufferedReader(_Zstandard(file), GRAIN_BYTES)
    opened: Any = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(kind)
    return opened(file) if opened else file


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
