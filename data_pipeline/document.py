"""A document, or the reason it was dropped."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Document:
    """One text. `id` names its place for people; no code depends on it."""

    id: str
    text: str
    source: str = ""
    """File and line, where the id is not that."""
    metadata: dict[str, Any] | None = None
    """Other keys of its line that were asked for."""

    def to_json(self) -> dict[str, Any]:
        """The fields that it has."""
        more = {"source": self.source, "metadata": self.metadata}
        return {"id": self.id, "text": self.text} | {name: value for name, value in more.items() if value}


@dataclass(frozen=True, slots=True)
class Drop:
    """A stage's decision to drop a document; documents are counted by `reason`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """Input that is not a document: its place, the reason, and its first characters."""

    source: str
    line: int
    """Line number from 1."""
    reason: str
    excerpt: str


class Unfit(Exception):
    """Raised for a text that no filter can treat in reasonable time; its document goes to quarantine."""


def size_bytes(text: str) -> int:
    """Length of the text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8"))
