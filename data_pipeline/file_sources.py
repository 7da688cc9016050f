"""Local files as sources: JSON lines, Parquet tables, plain text."""

import glob
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

from data_pipeline.document import Document, Malformed
from data_pipeline.workers import Workers
from lineage.digest import sha256_file, sha256_json
from lineage.errors import BadInput

SUFFIXES = {
    "jsonl": (".jsonl", ".jsonl.gz", ".json", ".json.gz"),
    "parquet": (".parquet",),
    "text": (".txt", ".md", ".rst"),
}
EXCERPT_CHARACTERS = 300
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class FileSource:
    """`jsonl:PATH`, `parquet:PATH` or `text:PATH`. Raises BadInput if PATH names no file.

    A directory stands for the files of that kind below it, in order of path. JSON lines and Parquet tables hold a
    document in each `text`; a text file is one document.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._kind, _, self._path = name.partition(":")

    @cached_property
    def files(self) -> list[tuple[str, Path]]:
        """Name and path of each file."""
        path = Path(self._path).expanduser()
        if path.is_file():
            return [(path.name, path)]
        if path.is_dir():
            below = sorted(
                file for file in path.rglob("*") if file.name.endswith(SUFFIXES[self._kind]) and file.is_file()
            )
            found = [(file.relative_to(path).as_posix(), file) for file in below]
        else:
            matching = sorted(glob.glob(str(path), recursive=True))
            found = [(Path(file).name, Path(file)) for file in matching if Path(file).is_file()]
        if not found:
            raise BadInput(f"source {self.name}: there is no such file")
        return found

    def fingerprint(self) -> str:
        try:
            return sha256_json([[name, sha256_file(path)] for name, path in self.files])
        except OSError as error:
            raise BadInput(f"source {self.name} cannot be read: {error}") from error

    def describe(self) -> str:
        count = len(self.files)
        return self.name if count == 1 else f"{self.name} ({count:,} files)"

    def read(self, workers: Workers) -> Iterator[Document | Malformed]:
        reader: Callable[[str, Path], Iterator[Document | Malformed]]
        reader = {"jsonl": _read_jsonl, "parquet": _read_parquet, "text": _read_text}[self._kind]
        for name, path in self.files:
            try:
                yield from reader(name, path)
            except (OSError, EOFError, zlib.error) as error:
                raise BadInput(f"{path} cannot be read: {error}") from error


def mend_surrogates(text: str) -> str:
    """Half surrogate pairs, which no encoding can write, become U+FFFD as in ftfy."""
    return LONE_SURROGATE.sub("\ufffd", text)


def _read_jsonl(name: str, path: Path) -> Iterator[Document | Malformed]:
    with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as file:
        for number, line in enumerate(file, 1):
            line = line.strip()
            if not line:
                continue
            try:
                text = _text_of(json.loads(line.decode("utf-8").removeprefix("\ufeff")))
            except UnicodeDecodeError as error:
                yield _malformed(name, number, f"invalid UTF-8 at byte {error.start}", line)
            except json.JSONDecodeError as error:
                yield _malformed(name, number, f"not JSON: {error.msg} at character {error.pos}", line)
            except (ValueError, RecursionError) as error:
                yield _malformed(name, number, str(error), line)
            else:
                yield Document(f"{name}:{number}", text)


def _text_of(value: object) -> str:
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    if "text" not in value:
        raise ValueError("no text")
    text = value["text"]
    if not isinstance(text, str):
        raise ValueError("text is not a string")
    return mend_surrogates(text)


def _read_parquet(name: str, path: Path) -> Iterator[Document | Malformed]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as table:
            if "text" not in table.schema_arrow.names:
                raise BadInput(f"{path} has no column named text")
            for batch in table.iter_batches(columns=["text"]):
                for value in batch.column(0):
                    number += 1
                    try:
                        yield Document(f"{name}:{number}", mend_surrogates(_text_of({"text": value.as_py()})))
                    except UnicodeDecodeError as error:
                        yield _malformed(name, number, f"invalid UTF-8 at byte {error.start}", b"")
                    except ValueError as error:
                        yield _malformed(name, number, str(error), str(value.as_py()).encode())
    except pyarrow.ArrowException as error:
        raise BadInput(f"{path} is not a readable Parquet file: {error}") from error


def _read_text(name: str, path: Path) -> Iterator[Document | Malformed]:
    content = path.read_bytes()
    try:
        yield Document(name, content.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        yield _malformed(name, line, f"invalid UTF-8 at byte {error.start}", content)


def _malformed(name: str, line: int, reason: str, content: bytes) -> Malformed:
    return Malformed(
        name, line, reason, content[: 4 * EXCERPT_CHARACTERS].decode("utf-8", "replace")[:EXCERPT_CHARACTERS]
    )
