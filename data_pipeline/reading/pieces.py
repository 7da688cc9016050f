"""What a corpus is cut into: pieces of files, and shards made of pieces."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

GRAIN_BYTES = 1 << 16
"""A file of lines is cut at multiples of this."""
SHARD_BYTES = 64 << 20
SMALLEST_SHARD_BYTES = 1 << 20
SHARDS_OF_A_SMALL_CORPUS = 64


@dataclass(frozen=True)
class Piece:
    """A file or a part of one."""

    kind: str
    """How it is read: `jsonl`, `documents`, `harvest`, `parquet` or `text`."""
    name: str
    """Beginning of the ids of its documents."""
    path: str
    sha256: str
    """Of the whole file."""
    bytes: int
    """About how much of the file it is."""
    start: int = 0
    end: int = 0
    """Range in the file: bytes of lines that begin in it, or row groups; an empty range is the whole file."""
    before: int = 0
    """Newlines or rows before the range."""
    take: int | None = None
    """Documents after which the piece ends."""
    split: str = ""
    """Name of the split that it is part of, for a corpus that is already split."""
    stamp: str = ""
    """`stamp_of` the file when its digest was taken; empty where the file is this suite's own."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def stamp_of(path: Path) -> str:
    """What changes whenever a file does: its number, size and time of change."""
    status = path.stat()
    return f"{status.st_ino}-{status.st_size}-{status.st_ctime_ns}"


def choose_shard_bytes(wanted: int | None, total_bytes: int) -> int:
    """Size of a shard, a multiple of the grain: what is wanted, or 64 MiB, less for a corpus under 4 GiB."""
    by_size = max(SMALLEST_SHARD_BYTES, total_bytes // SHARDS_OF_A_SMALL_CORPUS)
    size = wanted or min(SHARD_BYTES, by_size)
    return max(GRAIN_BYTES, size // GRAIN_BYTES * GRAIN_BYTES)


def cut_lines(piece: Piece, shard_bytes: int, newlines: list[int] | None = None) -> Iterator[Piece]:
    """A whole file of lines as pieces; `newlines` are those before each multiple of the grain, if ids need them."""
    for start in range(0, piece.bytes, shard_bytes):
        end = min(start + shard_bytes, piece.bytes)
        before = newlines[start // GRAIN_BYTES] if newlines else 0
        yield replace(piece, start=start, end=end, before=before, bytes=end - start)


def pack(pieces: Iterable[Piece], shard_bytes: int) -> list[list[Piece]]:
    """Pieces in order as shards of at most `shard_bytes`, or of one piece; no shard has pieces of two splits."""
    shards: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if not shards or piece.bytes > room or piece.split != shards[-1][-1].split:
            shards.append([])
            room = shard_bytes
        shards[-1].append(piece)
        room -= piece.bytes
    return shards
