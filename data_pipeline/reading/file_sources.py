"""Files as sources: JSON lines, Parquet and Arrow tables, plain text, and directories that a verb
wrote."""

import glob
import itertools
import lzma
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mlm_repro.data_pipeline.document import Document, size_bytes
from mlm_repro.data_pipeline.reading.config import ENDINGS, SourcesConfig
from mlm_repro.data_pipeline.reading.lines import (
    CHUNK_BYTES,
    COMPRESSIONS,
    Cut,
    expanded_bytes,
    open_bytes,
    survey,
)
from mlm_repro.data_pipeline.reading.pieces import SHARD_BYTES, Piece, cut_lines
from mlm_repro.data_pipeline.reading.readers import (
    Item,
    is_table,
    mend_surrogates,
    open_arrow,
    read_pieces,
    table_bytes,
)
from mlm_repro.data_pipeline.reading.remote import Remote
from mlm_repro.data_pipeline.reading.splits import SHARD, TRAIN, choose_splits, tell_splits
from mlm_repro.data_pipeline.work.workspace import Workspace
from mlm_repro.lineage.digest import is_sealed, sealed_files, sha256_json
from mlm_repro.lineage.environment import available_cores
from mlm_repro.lineage.errors import BadInput, IntegrityFailure, refuse_non_text
from mlm_repro.lineage.progress import Progress
from mlm_repro.lineage.remembered import stamp_of

SUFFIXES = {
    kind: tuple(
        map(
            "".join,
            itertools.product(
                names, ("", *[*COMPRESSIONS.values()] * (kind in ("jsonl", "csv", "warc")))
            ),
        )
    )
    for kind, names in ENDINGS.items()
}
Files = list[tuple[str, Path | Remote]]
"""List of files, each a pair of its name and its path or remote address."""


class FileSource:
    """Source of the documents in the local or remote files that `name` gives: `jsonl:PATH`,
    `parquet:PATH`, `csv:PATH`, `documents:PATH` and so on. PATH is a file, a directory, a pattern,
    an address or, for standard input, `-`. The method `pieces` yields the files as Pieces, `sample`
    yields Items, such as documents. Files are looked up at first use and not when it is made; then
    BadInput is raised if there are none, or if a split or a link is wrong.

    A directory stands for all files of that kind below it, in order of path; the number of its
    other files is printed to standard error. Of several splits only `train` is read, or the ones
    that `split` in `config`, a SourcesConfig, names; the number of files of other splits is printed
    too. `config` also has the keys of the text, the id and the metadata in a line or a row. It is
    not used for `text` and `documents`, where all splits are read.

    Each JSON line, each row of a table and each record of plain text in an archive is a document; a
    text file is one document. `documents` is a directory that a verb wrote, whose documents keep
    their ids, with PATH before them if `is_compared`; IntegrityFailure is raised if it is not
    complete.
    """

    is_named = False
    """True if the source's path is put before its files' names, because another source has files of
    the same names."""

    def __init__(
        self, name: str, config: SourcesConfig | None = None, is_compared: bool = False
    ) -> None:
        self.name = name
        self.kind, _, self._path = name.partition(":")
        self._keys: dict[str, Any] = {"owner": self._path} if is_compared else {}
        self._wanted = config.split if config else ()
        self._left_out = ""
        if config and self.kind not in ("text", "documents"):
            self._keys = config.piece_keys

    @property
    def _root(self) -> Path:
        """The path in the source's name as a Path, with the home directory in place of a leading
        `~/`. It need not exist."""
        return Path.home() / self._path[2:] if self._path.startswith("~/") else Path(self._path)

    @cached_property
    def _spool(self) -> Any:
        """A named temporary file, open for writing, for the content of a pipe; the file is removed
        with the source."""
        return tempfile.NamedTemporaryFile(prefix="mlm-data-")

    @cached_property
    def files(self) -> Files:
        """List of pairs for each file that is read: its name, such as its path below the source's
        folder, and its Path or Remote. They are in order and, unless the kind is `text` or
        `documents`, split by split. At first access standard input or a pipe is copied to a
        temporary file, and a note on standard error gives the number of files that are left out.
        Raises BadInput if there are none, or if a split or a link is wrong; IntegrityFailure if the
        directory of `documents` is not complete; for remote files also the errors of Remote."""
        path = self._root
        if "://" in self._path:
            return self._elsewhere(Remote(self._path))
        if self.kind == "documents":
            return self._written_by_a_verb(path)
        if path.is_file():
            return [(path.name, path)]
        if self._path == "-" or path.is_fifo():
            with (Path("/dev/stdin") if self._path == "-" else path).open("rb") as pipe:
                shutil.copyfileobj(pipe, self._spool, 1 << 20)
            self._spool.flush()
            return [("stdin", Path(self._spool.name))]
        if path.is_dir():
            root = path
            files = [*self._below(path)]
        else:
            matching = [Path(file) for file in sorted(glob.glob(str(path), recursive=True))]
            fixed = itertools.takewhile(lambda part: not glob.has_magic(part), path.parts[:-1])
            root = Path(*fixed)
            files = [
                (file.relative_to(root).as_posix(), file) for file in matching if file.is_file()
            ]
        return self._of_splits(root, [*files])

    def _elsewhere(self, remote: Remote) -> Files:
        """Return a list of pairs, the name and Remote of each file below or at a remote address
        that is of this kind and of the splits to read, split by split; with the kind `text`, of all
        splits. A single file, or one that matches a pattern, may have any ending. Prints to
        standard error that files of other kinds or splits are left out. Raises BadInput if there
        are none, for a split that they do not have, and for `documents`; and the errors of Remote.
        """
        if self.kind == "documents":
            raise BadInput(
                f"source {self.name}: `documents:` takes a folder on this machine and no address:"
                " copy the dataset here, and name the copy"
            )
        listed = remote.files()
        endings = "" if len(listed) == 1 or "*" in remote.url else SUFFIXES[self.kind]
        files: Files = [file for file in listed if file[0].lower().endswith(endings)]
        self._warn_of(sorted({name for name, _ in listed} - {name for name, _ in files}))
        return self._of_splits(None if "*" in remote.url else remote, files)

    def _of_splits(self, root: Path | Remote | None, files: Files) -> Files:
        """Return a list of the `files`, pairs of a name and a Path or Remote, that belong to the
        splits to read, split by split; with the kind `text`, all files. Files of other splits are
        left out, which is printed to standard error and becomes part of the source's description.
        `root` is the folder that the files' names start from, or None if they have no common one.
        Raises BadInput if there are no files, for a name that is not UTF-8 text, for a list of
        splits in the folder that cannot be read, and for a split that the files do not have."""
        if not files:
            raise BadInput(
                f"source {self.name}: there is no file of that path or pattern, and no folder of"
                f" that path with {self.kind} files in it, by the endings of their names"
            )
        refuse_non_text(name for name, _ in files)
        if self.kind == "text":
            return files
        told = tell_splits(root if isinstance(root, Path) else None, [name for name, _ in files])
        chosen = choose_splits(
            self.name, told, self._wanted, isinstance(root, Remote) or root == self._root
        )
        split_of_files = [split or TRAIN for split in told]
        if others := [split for split in dict.fromkeys(split_of_files) if split not in chosen]:
            read = f"the split{'s' * (len(chosen) > 1)} {' and '.join(chosen)}"
            count = sum(split in others for split in split_of_files)
            self._left_out = f"{read}, without {count:,} files of {', '.join(others)}"
            print(
                f"note: {self.name} gives {self._left_out}; sources.split can name others",
                file=sys.stderr,
            )
        pairs = list(zip(files, split_of_files, strict=True))
        in_order = []
        for split in chosen:
            in_order += [file for file, split_of_file in pairs if split_of_file == split]
        return in_order

    @cached_property
    def total_bytes(self) -> int:
        """Approximate number of bytes of text in all files of the source; compressed files and
        Parquet tables count by their content. The files are looked up at first access, which raises
        the errors of `files`."""
        return sum(
            (
                _content_bytes(path)
                if self.kind == "parquet" or path.suffix == ".parquet"
                else expanded_bytes(path)
            )
            for _, path in self.files
        )

    @property
    def document_bytes(self) -> float:
        """Mean bytes of a document: of a line in the first megabyte of the first file for JSON
        lines, else of the texts of the documents among the first 100 items of `sample`, 1 if none
        of these is a document. JSON lines whose file is damaged there are sampled too. That much of
        the files is read at each access. Raises the errors of `files`, and of `sample` if it is
        read."""
        path = self.files[0][1]
        if self.kind in ("jsonl", "documents") and path.suffix != ".parquet":
            with suppress(OSError, EOFError, zlib.error, lzma.LZMAError), open_bytes(path) as file:
                head = file.read(CHUNK_BYTES)
                return max(1, len(head)) / max(1, head.count(b"\n"))
        sizes = [
            size_bytes(item.text)
            for item in itertools.islice(self.sample(), 100)
            if isinstance(item, Document)
        ]
        return max(1, sum(sizes)) / max(1, len(sizes))

    def fingerprint(self) -> str:
        """Return a digest of the names and the content of all files to read. The files are read for
        it, once. Raises BadInput if one cannot be read, IntegrityFailure if a file of `documents`
        differs from its seal, and the errors of `files`."""
        return sha256_json([[piece.name, piece.sha256] for piece, *_ in self._surveyed])

    def describe(self) -> str:
        """Return a description for people: the source's name, the number of its files if it has
        several, and a note of the splits that are left out. The files are listed for it. Raises the
        errors of `files`, such as BadInput if there are none."""
        notes = [f"{len(self.files):,} files"] * (len(self.files) > 1) + [self._left_out] * bool(
            self._left_out
        )
        return f"{self.name} ({'; '.join(notes)})" if notes else self.name

    def pieces(self, workspace: Workspace, shard_bytes: int) -> Iterator[Piece]:
        """Yield the source's files in order as Pieces: lines and frames cut to about `shard_bytes`,
        a multiple of GRAIN_BYTES, Parquet tables by row groups, other files whole. The files are
        read for their digests first, once; `workspace` is not used. Prints to standard error a note
        of a large compressed file of JSON lines that cannot be cut. Raises BadInput if a file
        cannot be read or a table lacks the text's column, IntegrityFailure if a file of `documents`
        differs from its seal, and the errors of `files`."""
        for piece, newlines, cuts in self._surveyed:
            if is_table(piece):
                yield from _cut_table(piece, shard_bytes)
            elif newlines:
                yield from cut_lines(piece, shard_bytes, newlines)
            elif cuts:
                yield from _cut_frames(piece, shard_bytes, cuts)
            else:
                if self.kind in ("jsonl", "documents") and piece.bytes > SHARD_BYTES:
                    why = (
                        f"{piece.path} is one frame of compression, which one process reads"
                        " by itself"
                    )
                    print(
                        f"note: {why}; a file of many frames, such as bgzip and pzstd write, is"
                        " shared among the processes",
                        file=sys.stderr,
                    )
                yield piece

    def sample(self) -> Iterator[Item]:
        """Yield the documents, the malformed input and the blank lines (None) of all files in
        order, without computing a digest of their files beforehand. Raises the errors of
        `read_pieces`, such as Damaged if a file cannot be read to its end, BadInput if a table
        lacks the text's column, and the errors of `files`."""
        for name, path in self.files:
            piece = Piece(self.kind, name, str(path), "", path.stat().st_size, **self._keys)
            yield from read_pieces(_cut_table(piece, 1) if is_table(piece) else [piece])

    def _below(self, path: Path) -> Iterator[tuple[str, Path]]:
        """Yield a pair of name and Path for each file whose ending is of this kind below the
        directory `path`, in order of path; a name is the path below the directory; hidden files and
        folders are skipped, and so are `cache-*` files beside Arrow tables. Unless the kind is
        `documents`, a warning on standard error at the end gives the number of other files. Raises
        BadInput for a link that leads out of the directory or to nothing."""
        resolved = path.resolve()
        others = []
        snapshots = [
            folder for folder in (resolved, *resolved.parents) if folder.name == "snapshots"
        ]
        # A Hugging Face cache links from `snapshots` to `blobs` beside it.
        roots = [
            resolved,
            *(folder.with_name("blobs") for folder in snapshots),
        ]
        for file in sorted(path.rglob("*")):
            hidden = any(name.startswith(".") for name in file.relative_to(path).parts)
            if hidden or not (file.is_file() or file.is_symlink()):
                continue
            # `Dataset.map` writes its results beside the files that it read.
            is_made = self.kind == "arrow" and file.name.startswith("cache-")
            if is_made or not file.name.lower().endswith(SUFFIXES[self.kind]):
                others.append(file)
                continue
            # A link out of the directory is refused without telling whether its target exists.
            if not any(map(file.resolve().is_relative_to, roots)):
                raise BadInput(
                    f"source {self.name}: {file} is a link out of the directory; name its target as"
                    " a source of its own, or remove the link"
                )
            if not file.exists():
                raise BadInput(
                    f"source {self.name}: {file} is a link to {file.readlink()}, which is not"
                    " there: restore that file, or remove the link"
                )
            yield file.relative_to(path).as_posix(), file
        self._warn_of([file.name for file in others])

    def _warn_of(self, others: list[str]) -> None:
        if others and self.kind != "documents":
            names = ", ".join(others[:3])
            print(
                f"warning: {self.name} leaves {len(others):,} other files out, such as {names}",
                file=sys.stderr,
            )

    def _written_by_a_verb(self, path: Path) -> Files:
        """Return a list of pairs, in order of path, for the files of documents in the directory
        `path` that mlm-data wrote: the name, which is the path below the directory, and the Path.
        Raises BadInput if there is no such directory, if it has no such file, or for a link that
        leads out of it or to nothing, and IntegrityFailure if the directory is not complete."""
        if not path.is_dir():
            raise BadInput(
                f"source {self.name}: there is no such directory; a source `documents:PATH`, and a"
                " path in `deduplicate.against`, is a dataset or what a verb of `mlm-data` wrote"
            )
        below = [*self._below(path)]
        shards: Files = [(name, file) for name, file in below if file.name.startswith("shard-")]
        shards = shards or [(name, file) for name, file in below if name.startswith("documents/")]
        if shards and not is_sealed(path):
            raise IntegrityFailure(
                f"{path} is not complete, so that its documents are not read: run again the command"
                " that made it"
            )
        if not shards:
            raise BadInput(
                f"{path} holds no documents: it has no shard-*.jsonl and no documents/, which"
                " `mlm-data run` and the verbs but `import`, `tokenize` and `overlap` write"
            )
        return shards

    @cached_property
    def _surveyed(self) -> list[tuple[Piece, list[int], list[Cut]]]:
        """List of a triple for each file, in order, as `_survey` returns it: a Piece with its
        SHA-256, a list of the number of newlines before each grain of GRAIN_BYTES, and a list of
        the Cuts of its compressed frames. The two lists are the positions at which the file can be
        cut; a list is empty where there are none. The files are read at first access, with progress
        on standard error. Raises BadInput if one cannot be read, IntegrityFailure if a file of
        `documents` differs from the seal of its directory, and the errors of `files`."""
        try:
            size = sum(path.stat().st_size for _, path in self.files)
            with (
                Progress(f"digest of {self.name}", size, "bytes") as progress,
                ThreadPoolExecutor(available_cores()) as threads,
            ):
                return [
                    *threads.map(lambda file: self._survey(file[0], file[1], progress), self.files)
                ]
        except OSError as error:
            raise BadInput(
                f"a file of the source {self.name} cannot be read: {error}; make it readable, or"
                " name another source"
            ) from error

    def _survey(
        self, name: str, path: Path | Remote, progress: Progress
    ) -> tuple[Piece, list[int], list[Cut]]:
        """Read the file at `path` once, and return a triple: a Piece of the whole file with its
        SHA-256, and two lists of the positions at which the file can be cut, the number of newlines
        before each grain of GRAIN_BYTES and the Cuts of its compressed frames; a list is empty
        where there are none. `name` is the file's name in the source, by which its documents are
        called. `progress` counts the bytes. Raises IntegrityFailure for a file of `documents` that
        differs from the seal of its directory; OSError if the file cannot be read, for a remote
        file the errors of Remote."""
        size = path.stat().st_size
        split = name.split("/")[0] if self.kind == "documents" and "/" in name else ""
        split = SHARD.sub("", Path(name).stem) if split == "documents" else split
        stamp = stamp_of(path)
        if self.is_named:
            name = (
                str(path)
                if isinstance(path, Remote)
                else (self._root / name if self._root.is_dir() else path).as_posix()
            )
        address = str(path.resolve() if isinstance(path, Path) else path)
        piece = Piece(
            self.kind,
            mend_surrogates(name),
            address,
            "",
            size,
            split=split,
            stamp=stamp,
            **self._keys,
        )
        is_of_lines = self.kind in ("jsonl", "documents") and not is_table(piece)
        digest, newlines, cuts = survey(path, is_of_lines, progress.advance)
        if self.kind == "documents" and digest != self._sealed_digests.get(name):
            raise IntegrityFailure(
                f"{path} is not as it was sealed by the command that wrote its directory: restore"
                " it, or remove that directory and run the command again"
            )
        return replace(piece, sha256=digest), newlines, cuts

    @cached_property
    def _sealed_digests(self) -> dict[str, str]:
        return {name: entry["sha256"] for name, entry in sealed_files(self._root).items()}


def _cut_frames(piece: Piece, shard_bytes: int, cuts: list[Cut]) -> Iterator[Piece]:
    """Yield consecutive parts of `piece`, the Piece of a whole compressed file, as Pieces cut at
    the starts of frames in `cuts`. The first entry of `cuts` is where the first part begins, and
    the last is the end of the file. Each part but the last has at least `shard_bytes` of
    decompressed content; the field `bytes` is the exact size of a part's content."""
    first = cuts[0]
    for cut in cuts[1:]:
        if (size := cut.content - first.content) >= shard_bytes or cut is cuts[-1]:
            frames = replace(piece, start=first.start, end=cut.start, before=first.newlines)
            yield replace(frames, bytes=size, is_inside=first.is_inside)
            first = cut


def _content_bytes(path: Path | Remote) -> int:
    """Return the number of uncompressed bytes of the Parquet table at `path`, from its metadata, or
    the file's size if the metadata cannot be read. The errors of Remote are passed on."""
    import pyarrow
    from pyarrow import parquet

    try:
        with table_bytes(str(path)) as file:
            table = parquet.read_metadata(file)
    except (pyarrow.ArrowException, OSError):
        return path.stat().st_size
    return sum(table.row_group(number).total_byte_size for number in range(table.num_row_groups))


def _cut_table(piece: Piece, shard_bytes: int) -> Iterator[Piece]:
    """Yield pieces of a Parquet table, runs of row groups, each but the last of `shard_bytes` or
    more before compression; none of a table without row groups. Raises BadInput if the table has no
    column of text or bytes with the name `piece.text_key`.

    An Arrow table is checked for that column too and left whole; so is a file that is not a table,
    for its reader to refuse.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        if piece.kind == "arrow":
            with table_bytes(piece.path) as file:
                _check_column(piece, open_arrow(file)[0])
            yield piece
            return
        with table_bytes(piece.path) as file, parquet.ParquetFile(file) as table:
            _check_column(piece, table.schema_arrow)
            groups = [
                table.metadata.row_group(number) for number in range(table.metadata.num_row_groups)
            ]
            sizes = [(group.num_rows, group.total_byte_size) for group in groups]
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError):
        yield piece
        return
    start = rows = 0
    size = passed = 0
    for number, (group_rows, group_bytes) in enumerate(sizes, 1):
        passed += group_rows
        size += group_bytes
        if size >= shard_bytes or number == len(sizes):
            yield replace(piece, start=start, end=number, before=rows, bytes=size)
            start = number
            rows = passed
            size = 0


def _check_column(piece: Piece, schema: Any) -> None:
    """Raise BadInput unless a table with this `schema` has a column, or a field in a struct, with
    the name `piece.text_key` and of text or bytes. The error lists the columns."""
    from pyarrow import types

    fields = [*schema]
    for field in fields:  # the list grows by the inner fields of each struct
        fields += field.flatten() if types.is_struct(field.type) else []
    kind = next((field.type for field in fields if field.name == piece.text_key), None)
    if kind is not None and types.is_dictionary(kind):
        kind = kind.value_type
    if kind is None or str(kind) not in (
        "string",
        "large_string",
        "string_view",
        "binary",
        "large_binary",
    ):
        has = (
            f"has no column named {piece.text_key}"
            if kind is None
            else f"has {kind} in its column {piece.text_key}"
        )
        columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
        raise BadInput(
            f"{piece.path} {has}, and sources.text_key must name a column of text or bytes; its"
            f" columns: {columns}"
        )
