"""What a page cannot show of files that other rooms wrote, and names of its own files."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from lineage.errors import UserError
from lineage.files import SchemaT, one_line, read_document

T = TypeVar("T")


@dataclass(frozen=True)
class Problem:
    """Something the page cannot show, in one sentence."""

    part: str
    """File it concerns."""
    sentence: str
    damaged: bool
    """False where the file is only absent or empty; True where it is not what it was when it was written."""


class Problems(list[Problem]):
    """What cannot be shown, gathered while files are read."""

    def add(self, part: str, sentence: str, damaged: bool = True) -> None:
        """One more."""
        self.append(Problem(part, sentence, damaged))

    def document(self, path: Path, model: type[SchemaT], part: str, what: str) -> SchemaT | None:
        """The file as a document; None where it is not there, or is none, which is said."""
        try:
            return read_document(path, model) if path.is_file() else None
        except UserError as error:
            self.add(part, f"{what} cannot be shown: {error}.")
            return None

    def lines(self, part: str, of: str, lines: Iterable[bytes], parse: Callable[[bytes], T], first: int = 1) -> list[T]:
        """What `parse` makes of each line; those that it refuses are said by number, the first line being `first`."""
        parsed = []
        for number, line in enumerate(lines, first):
            try:
                parsed.append(parse(line))
            except (ValueError, UserError) as error:
                self.add(part, f"Line {number} of {of} is left out: {reason(error)}.")
        return parsed


def reason(error: Exception) -> str:
    """What the error says, short; of a document the first field that is wrong."""
    if not isinstance(error, ValidationError):
        return one_line(error)
    first = error.errors()[0]
    return ": ".join(part for part in (".".join(map(str, first["loc"])), first["msg"]) if part)


def file_name(text: str) -> str:
    """The text with a hyphen for whatever does not belong in a file's name."""
    return re.sub(r"[^\w.-]", "-", text)
