"""Lines of files that may be hostile: in bounded memory, whatever their length and however they were compressed."""

import bz2
import gzip
import hashlib
import io
import lzma
import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson
import zstandard

from mlm_repro.data_pipeline.reading.pieces import GRAIN_BYTES
from mlm_repro.data_pipeline.reading.remote import Remote
from mlm_repro.lineage.atomic import parse_json

CHUNK_BYTES = 1 << 20
SMALL_CHUNK_BYTES = 1 << 12
COMPRESSIONS = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"BZh": ".bz2", b"\xfd7zXZ": ".xz"}
"""First bytes of compressed files, with the usual ending of their names."""


class Cut(NamedTuple):
    """A place at which a file can be entered."""

    start: int
    """Byte of the file."""
    content: int
    newlines: int
    """Bytes of content, and newlines in them, before it."""
    is_inside: bool
    """True inside of a line."""


class _Frames:
    """Finds the frames of a Zstandard file, or the members of one of gzip, while it is read."""

    def __init__(self, kind: str) -> None:
        self._new = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj if kind == ".zst" else _member
        self._frame: Any = self._new()
        self._read, self._at, self._is_whole = 0, Cut(0, 0, 0, False), kind in (".zst", ".gz")
        self._cuts = [self._at]

    def feed(self, content: bytes) -> None:
        """Read on; a chunk is small enough to be kept in memory whatever it expands to."""
        self._read += len(content)
        while content and self._is_whole:
            if self._frame.eof:
                self._frame = self._new()
                if self._at.content - self._cuts[-1].content >= CHUNK_BYTES:
                    self._cuts.append(self._at._replace(start=self._read - len(content)))
            try:
                out = self._frame.decompress(content)
            except (zlib.error, zstandard.ZstdError):
                self._is_whole = False
                return
            content = self._frame.unused_data if self._frame.eof else b""
            is_inside = out[-1:] != b"\n" if out else self._at.is_inside
            _, before, newlines, _ = self._at
            self._at = Cut(self._read, before + len(out), newlines + out.count(b"\n"), is_inside)

    def cuts(self) -> list[Cut]:
        """Where it can be entered, and its end; nothing for a single frame, and for what is damaged."""
        return [*self._cuts, self._at] if self._is_whole and self._frame.eof and len(self._cuts) > 1 else []


def _member() -> Any:
    return zlib.decompressobj(31)


def survey(
    path: Path | Remote, is_of_lines: bool, advance: Callable[[int], object]
) -> tuple[str, list[int], list[Cut]]:
    """SHA-256 of a file; newlines before each grain of one that is not compressed; where a compressed one is cut."""
    digest, newlines, kind = hashlib.sha256(), [0], compression(path) if is_of_lines else ""
    frames = _Frames(kind)
    with path.open("rb") as file:
        while chunk := file.read(GRAIN_BYTES):
            digest.update(chunk)
            advance(len(chunk))
            if not kind:
                newlines.append(newlines[-1] + chunk.count(b"\n"))
            for start in range(0, len(chunk) if kind else 0, SMALL_CHUNK_BYTES):
                frames.feed(chunk[start : start + SMALL_CHUNK_BYTES])
    return digest.hexdigest(), [] if kind or not is_of_lines else newlines, frames.cuts()


def compression(path: Path | Remote) -> str:
    """The kind of compression as the ending of a name, told by content; by the ending where the content is no kind.

    An empty file is of none.
    """
    with path.open("rb", 0) as file:
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
def open_bytes(path: Path | Remote, start: int = 0) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed; from the frame on that begins at `start`."""
    with path.open("rb", CHUNK_BYTES) as file:
        file.seek(start)
        yield _decompressed(file, compression(path))


def expanded_bytes(path: Path | Remote) -> int:
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
            length += skip_line(stream)
        yield line, length


def skip_line(file: BinaryIO, most: float = math.inf) -> int:
    """Read to the end of a line, or until `most` bytes were read, and return how many were."""
    length = 0
    while length < most and (chunk := file.readline(CHUNK_BYTES)):
        length += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return length


def seek_line(file: BinaryIO, start: int, end: int) -> int | None:
    """Move to the first line that begins in `[start, end)` and return its position, None if there is none."""
    if start == 0:
        return 0 if end else None
    file.seek(start - 1)
    position = start - 1 + skip_line(file, end - start + 1)
    return position if position < end else None


def parse_line(line: bytes) -> Any:
    """The JSON value of a line. `json` accepts lone surrogates and explains errors better than orjson."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return parse_json(line.decode("utf-8").removeprefix("\ufeff"))
