"""Lines of files that may be hostile: in bounded memory, whatever their length and however they
were compressed."""

import bz2
import gzip
import hashlib
import io
import lzma
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
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
"""First bytes of a compressed file → the usual ending of its name."""


class Cut(NamedTuple):
    """A position at which a compressed file can be entered, the start of a frame; or, as the last
    of a list, the end of the file. `start` is the position in the compressed file in bytes;
    `content` and `newlines` are the numbers of bytes and of newlines of the decompressed content
    before it. `is_inside` is True if the frame begins inside of a line."""

    start: int
    """First byte of the frame in the compressed file."""
    content: int
    newlines: int
    """Number of newlines in the decompressed content before the frame; `content` is that content's
    number of bytes."""
    is_inside: bool
    """True if the frame begins inside of a line."""


def _expand(chunks: Iterable[bytes], kind: str) -> Iterator[tuple[bytes, int]]:
    """Yield pairs: a piece of the decompressed content of a file, and the byte, counted from the
    first of `chunks`, at which its compressed frame begins. `chunks` are the bytes of the file from
    the start of a frame on, and `kind` is `.zst` or `.gz`.

    Chunks must be small, because a piece is held in memory, whatever size it expands to. Raises
    EOFError if the file is cut off or empty, OSError or zlib.error if it is damaged.
    """
    begin = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame: Any = None
    start = end = 0
    for chunk in chunks:
        end += len(chunk)
        while chunk:
            if frame is None or frame.eof:
                frame = begin.decompressobj() if kind == ".zst" else zlib.decompressobj(31)
                start = end - len(chunk)
            try:
                content = frame.decompress(chunk)
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from error
            chunk = frame.unused_data
            yield content, start
    if frame is None or not frame.eof:
        raise EOFError("the file is cut off: its compressed content does not come to an end")


def survey(
    path: Path | Remote, is_of_lines: bool, advance: Callable[[int], object]
) -> tuple[str, list[int], list[Cut]]:
    """Return three values for the file at `path`, which is read once: its SHA-256; for an
    uncompressed file of lines, the list of the numbers of newlines before each grain of
    GRAIN_BYTES, and last in the whole file; for one compressed by gzip or Zstandard, the list of
    its Cuts. A list is empty where it does not apply; without `is_of_lines` both are. `advance` is
    called with the number of bytes of each read.

    The first cut is the start of the file, the last its end; the others are starts of frames,
    CHUNK_BYTES or more of content apart. A file without such a frame, such as one of a single
    frame, and a damaged file have no cuts. Raises OSError if the file cannot be opened, for a
    remote file the errors of Remote.
    """
    digest = hashlib.sha256()
    newlines = [0]
    kind = compression(path) if is_of_lines else ""
    cuts = [Cut(0, 0, 0, False)]
    frame = 0
    content = 0
    lines = 0
    is_inside = False
    is_whole = False
    with path.open("rb") as file:

        def chunks(size: int) -> Iterator[bytes]:
            while chunk := file.read(size):
                digest.update(chunk)
                advance(len(chunk))
                yield chunk

        with suppress(OSError, EOFError, zlib.error):
            for out, start in (
                _expand(chunks(SMALL_CHUNK_BYTES), kind) if kind in (".zst", ".gz") else ()
            ):
                if start > frame and content - cuts[-1].content >= CHUNK_BYTES:
                    cuts.append(Cut(start, content, lines, is_inside))
                frame = start
                content += len(out)
                lines += out.count(b"\n")
                is_inside = out[-1:] != b"\n" if out else is_inside
            is_whole = len(cuts) > 1
            cuts.append(Cut(file.tell(), content, lines, is_inside))
        for chunk in chunks(GRAIN_BYTES):
            newlines.append(newlines[-1] + chunk.count(b"\n"))
    return digest.hexdigest(), [] if kind or not is_of_lines else newlines, cuts if is_whole else []


def compression(path: Path | Remote) -> str:
    """Open the file at `path`, and return its kind of compression as an ending such as `.gz`: by
    its first bytes, else by the ending of its name; "" if it is not compressed or empty. Raises
    OSError if it cannot be opened, for a remote file the errors of Remote."""
    with path.open("rb", 0) as file:
        head = file.read(8)
    ending = path.suffix.lower() if head and path.suffix.lower() in COMPRESSIONS.values() else ""
    return next((kind for magic, kind in COMPRESSIONS.items() if head.startswith(magic)), ending)


class _Zstandard(io.RawIOBase):
    """The content of `file`, a Zstandard file that is open for reading, as a stream that is read
    from front to back. A long window takes up to 2 GiB of memory. Reading raises EOFError if the
    file is cut off, OSError if it is damaged."""

    def __init__(self, file: BinaryIO) -> None:
        self._content = _expand(iter(lambda: file.read(SMALL_CHUNK_BYTES), b""), ".zst")
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest and (piece := next(self._content, None)):
            self._rest = piece[0]
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


@contextmanager
def open_bytes(path: Path | Remote, start: int = 0) -> Iterator[BinaryIO]:
    """Context manager: yield the file at `path` as a stream of its decompressed bytes, from the
    compressed frame, or the byte of a plain file, at `start`. Reading a damaged or cut file raises
    OSError, EOFError, zlib.error or lzma.LZMAError, and opening a missing one OSError; remote files
    raise the errors of Remote."""
    with path.open("rb", CHUNK_BYTES) as file:
        file.seek(start)
        yield _decompressed(file, compression(path))


def expanded_bytes(path: Path | Remote) -> int:
    """Return the size in bytes of the decompressed content of the file at `path`: the file's own
    size if it is not compressed, else an estimate from the file's first megabyte, at least the
    file's own size. A damaged beginning counts as far as it can be read. Raises OSError if the file
    cannot be opened, for a remote file the errors of Remote."""
    size = path.stat().st_size
    kind = compression(path)
    content = 0
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
    """Yield pairs of a line of a binary stream, from its position on, and the line's length in
    bytes, newline included in each. A line of more than `max_bytes` without its newline is cut to
    CHUNK_BYTES at most and comes with its whole length."""
    while line := stream.readline(max_bytes + 1):
        length = len(line)
        if length > max_bytes and not line.endswith(b"\n"):
            line = line[:CHUNK_BYTES]
            length += skip_line(stream)
        yield line, length


def skip_line(file: BinaryIO, most: float = math.inf) -> int:
    """Read and discard bytes from the file's position to the end of the line, or until at least
    `most` were read, and return their number."""
    length = 0
    while length < most and (chunk := file.readline(CHUNK_BYTES)):
        length += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return length


def seek_line(file: BinaryIO, start: int, end: int) -> int | None:
    """Move the position of a file that was just opened to the first line that begins in its bytes
    `[start, end)` and return that position, or None if no line begins there."""
    if start == 0:
        return 0 if end else None
    file.seek(start - 1)
    position = start - 1 + skip_line(file, end - start + 1)
    return position if position < end else None


def parse_line(line: bytes) -> Any:
    """Return the JSON value of a line, given in bytes. Raises ValueError if it is not JSON in
    UTF-8. What orjson refuses is parsed by `json`, which accepts lone surrogates and NaN and
    explains errors better. A whole number of more than 64 bits may become a float."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return parse_json(line.decode("utf-8").removeprefix("\ufeff"))
