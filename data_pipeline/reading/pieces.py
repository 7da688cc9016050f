"""Pieces of files, and shards made of pieces."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

GRAIN_BYTES = 1 << 16
"""Size of a grain in bytes: files of lines are cut at multiples of it."""
SHARD_BYTES = 64 << 20
SMALLEST_SHARD_BYTES = 1 << 20
SHARDS_OF_A_SMALL_CORPUS = 64


@dataclass(frozen=True)
class Piece:
    """A file of input, or a range of one, that one task reads: its format, path and digest, the
    bytes, compressed frames or row groups that belong to the piece, and the keys under which lines
    or rows have the text, the id and the metadata."""

    kind: str
    """Format: `jsonl`, `documents`, `harvest`, `hub`, `parquet`, `arrow`, `csv`, `warc` or
    `text`."""
    name: str
    """Name of the file in its source, with which the ids begin of documents that have none of their
    own."""
    path: str
    sha256: str
    """Digest of the whole file."""
    bytes: int
    """Approximate size of the piece in bytes."""
    start: int = 0
    end: int = 0
    """End of the range in the file that begins at `start`: of bytes, for the lines or the
    compressed frames that begin in it, or of a Parquet table's row groups. An empty range is the
    whole file, of a Parquet table nothing."""
    before: int = 0
    """Number of newlines, or of a table's rows, in the file before the range."""
    text_key: str = "text"
    """Key of the text in a line or a row; dots lead to inner objects."""
    id_key: str | None = None
    """Key of the document's own id in a line or a row; None for ids made of the file's name and the
    line."""
    keep: tuple[str, ...] = ()
    """Other keys of a line or a row that stay with its document as metadata."""
    owner: str = ""
    """Path of the dataset that these documents belong to, if a dataset is compared with it; their
    ids then begin with it."""
    is_inside: bool | None = None
    """True if the piece consists of compressed frames and the first one begins inside of a line,
    False if it begins with a line. None if the piece does not consist of compressed frames. For
    frames, `bytes` is the exact size of their content."""
    take: int | None = None
    """Number of documents after which the piece ends; None for no limit."""
    split: str = ""
    """Name of the split that the piece belongs to, for a corpus that is already split; else
    empty."""
    stamp: str = ""
    """Text by which a change of the file is noticed, which the function `stamp_of` gave when the
    file's digest was taken; empty for a file that a task wrote."""


def choose_shard_bytes(wanted: int | None, total_bytes: int) -> int:
    """Return the size of a shard in bytes: `wanted`; if that is None, 64 MiB or, for a corpus of
    `total_bytes` under 4 GiB, a 64th of the corpus, but at least 1 MiB. The size is rounded down to
    a multiple of GRAIN_BYTES, and is at least one grain."""
    by_size = max(SMALLEST_SHARD_BYTES, total_bytes // SHARDS_OF_A_SMALL_CORPUS)
    size = wanted or min(SHARD_BYTES, by_size)
    return max(GRAIN_BYTES, size // GRAIN_BYTES * GRAIN_BYTES)


def cut_lines(piece: Piece, shard_bytes: int, newlines: list[int] | None = None) -> Iterator[Piece]:
    """Cut the file of lines that `piece` stands for, and yield Pieces of it, in order, each but the
    last of `shard_bytes`, a multiple of GRAIN_BYTES; none for an empty file. A line belongs to the
    Piece in which it begins. `newlines` has the number of newlines before each grain, if ids need
    line numbers; without it every Piece has 0 newlines before it."""
    for start in range(0, piece.bytes, shard_bytes):
        end = min(start + shard_bytes, piece.bytes)
        before = newlines[start // GRAIN_BYTES] if newlines else 0
        yield replace(piece, start=start, end=end, before=before, bytes=end - start)


def pack(pieces: Iterable[Piece], shard_bytes: int) -> list[list[Piece]]:
    """Return the pieces grouped, in order, into shards, a list of lists: each shard has at most
    `shard_bytes` bytes, or is a single larger piece. A shard never has pieces of two splits."""
    shards: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if not shards or piece.bytes > room or piece.split != shards[-1][-1].split:
            shards.append([])
            room = shard_bytes
        shards[-1].append(piece)
        room -= piece.bytes
    return shards
