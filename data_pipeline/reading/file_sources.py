"""Local files as sources: JSON lines, Parquet tables, plain text, and directories that a verb wrote."""

import glob
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from data_pipeline.reading.lines import COMPRESSIONS, compression
from data_pipeline.reading.pieces import GRAIN_BYTES, Piece, cut_lines, stamp_of
from data_pipeline.reading.readers import mend_surrogates
from data_pipeline.work.workspace import Workspace
from lineage.digest import is_sealed, sealed_files, sha256_file, sha256_json
from lineage.errors import BadInput, IntegrityFailure
from lineage.progress import Progress

SUFFIXES = {
    "jsonl": tuple(f"{name}{end}" for name in (".jsonl", ".json", ".ndjson") for end in ("", *COMPRESSIONS.values())),
    "parquet": (".parquet",),
    "text": (".txt", ".md", ".rst"),
    "documents": (".jsonl",),
}


class FileSource:
    """`jsonl:PATH`, `parquet:PATH`, `text:PATH` or `documents:PATH`. Raises BadInput if PATH names no file.

    A directory stands for the files of that kind below it, in order of path; how many others there are is printed.
    JSON lines and Parquet tables hold a document in each `text_key`; a text file is one document. `documents` is a
    directory that a verb wrote, whose documents keep their ids; it raises IntegrityFailure if it is not complete.
    """

    def __init__(self, name: str, text_key: str = "text") -> None:
        self.name = name
        self._kind, _, self._path = name.partition(":")
        self._text_key = text_key if self._kind in ("jsonl", "parquet") else "text"

    @property
    def _root(self) -> Path:
        """The named path, with `~` expanded."""
        return Path.home() / self._path[2:] if self._path.startswith("~/") else Path(self._path)

    @cached_property
    def files(self) -> list[tuple[str, Path]]:
        """Name and path of each file."""
        path = self._root
        if self._kind == "documents":
            return self._written_by_a_verb(path)
        if path.is_file():
            return [(path.name, path)]
        if path.is_dir():
            files = list(self._below(path))
        else:
            matching = sorted(glob.glob(str(path), recursive=True))
            files = [(Path(file).name, Path(file)) for file in matching if Path(file).is_file()]
        if not files:
            raise BadInput(f"source {self.name}: there is no such file")
        return files

    @property
    def total_bytes(self) -> int:
        """Size of the files."""
        return sum(path.stat().st_size for _, path in self.files)

    def fingerprint(self) -> str:
        return sha256_json([[piece.name, piece.sha256] for piece, _ in self._surveyed])

    def describe(self) -> str:
        count = len(self.files)
        return self.name if count == 1 else f"{self.name} ({count:,} files)"

    def pieces(self, workspace: Workspace, shard_bytes: int) -> Iterator[Piece]:
        """The files in order, cut where they can be."""
        for piece, newlines in self._surveyed:
            if piece.kind == "parquet":
                yield from _cut_parquet(piece, shard_bytes)
            elif newlines:
                yield from cut_lines(piece, shard_bytes, newlines)
            else:
                yield piece

    def _below(self, path: Path) -> Iterator[tuple[str, Path]]:
        roots, others = [path.resolve(), *_blobs(path.resolve())], list[Path]()
        for file in sorted(path.rglob("*")):
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if hidden or not (file.is_file() or file.is_symlink()):
                continue
            if not file.name.lower().endswith(SUFFIXES[self._kind]):
                others.append(file)
                continue
            if not (file.exists() and any(map(file.resolve().is_relative_to, roots))):
                raise BadInput(f"source {self.name}: {file} is a link out of the directory; name what it leads to")
            yield file.relative_to(path).as_posix(), file
        if others and self._kind != "documents":
            names = ", ".join(file.name for file in others[:3])
            print(f"WARNING: {self.name} leaves {len(others):,} files of other endings out: {names}", file=sys.stderr)

    def _written_by_a_verb(self, path: Path) -> list[tuple[str, Path]]:
        if not path.is_dir():
            raise BadInput(f"source {self.name}: there is no such directory")
        shards = [(name, file) for name, file in self._below(path) if file.name.startswith("shard-")]
        if shards and not is_sealed(path):
            raise IntegrityFailure(f"{path} is not complete: give the command that makes it again")
        if not shards:
            raise BadInput(f"{path} holds no documents: it has no shard-*.jsonl")
        return shards

    @cached_property
    def _surveyed(self) -> list[tuple[Piece, list[int]]]:
        """Every file with its digest and, if it can be cut at any line, its newlines before each grain."""
        surveys = []
        try:
            with Progress(f"digest of {self.name}", self.total_bytes, "bytes") as progress:
                for name, path in self.files:
                    surveys.append(self._survey(name, path, progress))
        except OSError as error:
            raise BadInput(f"source {self.name} cannot be read: {error}") from error
        return surveys

    def _survey(self, name: str, path: Path, progress: Progress) -> tuple[Piece, list[int]]:
        size = path.stat().st_size
        split = name.split("/")[0] if self._kind == "documents" and "/" in name else ""
        stamp = stamp_of(path)
        piece = Piece(self._kind, mend_surrogates(name), str(path.resolve()), "", size, split=split, stamp=stamp)
        piece = replace(piece, text_key=self._text_key)
        if self._kind in ("text", "parquet") or compression(path):
            digest, newlines = sha256_file(path), list[int]()
            progress.advance(size)
        else:
            digest, newlines = _count_newlines(path, progress)
        if self._kind == "documents" and digest != self._sealed_digests.get(name):
            raise IntegrityFailure(f"{path} was changed after it was written")
        return replace(piece, sha256=digest), newlines

    @cached_property
    def _sealed_digests(self) -> dict[str, str]:
        return {name: entry["sha256"] for name, entry in sealed_files(self._root).items()}


def _blobs(path: Path) -> Iterator[Path]:
    """The folder of a Hugging Face cache that the links in its snapshots lead to."""
    return (folder.parent / "blobs" for folder in (path, *path.parents) if folder.name == "snapshots")


def _count_newlines(path: Path, progress: Progress) -> tuple[str, list[int]]:
    digest, counts = hashlib.sha256(), [0]
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(GRAIN_BYTES):
            digest.update(chunk)
            counts.append(counts[-1] + chunk.count(b"\n"))
            progress.advance(len(chunk))
    return digest.hexdigest(), counts


def _cut_parquet(piece: Piece, shard_bytes: int) -> Iterator[Piece]:
    """Cut a table into runs of row groups. Raises BadInput for a file that is not a table of texts."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(piece.path) as table:
            _check_column(piece, table.schema_arrow)
            groups = [table.metadata.row_group(number) for number in range(table.metadata.num_row_groups)]
            sizes = [(group.num_rows, group.total_byte_size) for group in groups]
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{piece.path} is not a readable Parquet file: {error}") from error
    start = rows = 0
    size = passed = 0
    for number, (group_rows, group_bytes) in enumerate(sizes, 1):
        passed += group_rows
        size += group_bytes
        if size >= shard_bytes or number == len(sizes):
            yield replace(piece, start=start, end=number, before=rows, bytes=size)
            start, rows, size = number, passed, 0


def _check_column(piece: Piece, schema: Any) -> None:
    """Raise BadInput unless the table has a column of text under the key."""
    from pyarrow import types

    first, *rest = [piece.text_key] if piece.text_key in schema.names else piece.text_key.split(".")
    kind: Any = schema.field(first).type if first in schema.names else None
    for part in rest:
        is_there = kind is not None and types.is_struct(kind) and kind.get_field_index(part) >= 0
        kind = kind.field(part).type if is_there else None
    if kind is not None and types.is_dictionary(kind):
        kind = kind.value_type
    if kind is None or str(kind) not in ("string", "large_string", "string_view", "binary", "large_binary"):
        has = f"has no column named {piece.text_key}" if kind is None else f"has {kind} in its column {piece.text_key}"
        columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
        raise BadInput(f"{piece.path} {has}, and sources.text_key must name one of text; its columns: {columns}")
