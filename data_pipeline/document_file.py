"""Documents between two stages: on disk, in order, each with its number of tokens once that is known."""

import json
from array import array
from collections.abc import Iterator
from pathlib import Path

from data_pipeline.document import Document
from lineage.progress import Progress


class DocumentFile:
    """Appended to once, then read from the start or by number."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b")
        self._starts = array("q")
        self._end = 0

    def append(self, document: Document, tokens: int = 0) -> None:
        """Write one document at the end, with its token count."""
        line = json.dumps([document.id, document.text, tokens]).encode("ascii") + b"\n"
        self._starts.append(self._end)
        self._end += self._file.write(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> tuple[Document, int]:
        """The document and its tokens."""
        self._file.seek(self._starts[number])
        return _parse(self._file.readline())

    def __iter__(self) -> Iterator[tuple[Document, int]]:
        self._file.flush()
        with open(self._file.name, "rb") as file:
            yield from map(_parse, file)

    def documents(self, title: str = "") -> Iterator[Document]:
        """The documents without their tokens, counted under `title` on standard error if one is given."""
        with Progress(title, len(self), "documents", quiet=not title) as progress:
            for document, _ in self:
                yield document
                progress.advance()

    def texts(self, title: str = "") -> Iterator[str]:
        """The texts of `documents`."""
        return (document.text for document in self.documents(title))

    def discard(self) -> None:
        """Delete the file."""
        self._file.close()
        Path(self._file.name).unlink()


def _parse(line: bytes) -> tuple[Document, int]:
    identifier, text, tokens = json.loads(line)
    return Document(identifier, text), tokens
