"""Problems found in input files, and names of output files."""

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
    """A sentence on something that the page cannot show."""

    part: str
    """File that the sentence is about."""
    sentence: str
    damaged: bool
    """False if the file is only absent or empty; True if it changed after it was written."""


class Problems(list[Problem]):
    """Problems gathered while files are read."""

    def add(self, part: str, sentence: str, damaged: bool = True) -> None:
        """Add a problem."""
        self.append(Problem(part, sentence, damaged))

    def document(self, path: Path, model: type[SchemaT], part: str, what: str) -> SchemaT | None:
        """Read a file with a schema; None if it is absent, or if it does not fit, which becomes a Problem."""
        try:
            return read_document(path, model) if path.is_file() else None
        except UserError as error:
            self.add(part, f"{what} cannot be shown: {error}.")
            return None

    def lines(self, part: str, of: str, lines: Iterable[bytes], parse: Callable[[bytes], T], first: int = 1) -> list[T]:
        """Parse lines, the first of which has the number `first`; a refused line becomes a Problem."""
        parsed = []
        for number, line in enumerate(lines, first):
            try:
                parsed.append(parse(line))
            except (ValueError, UserError) as error:
                self.add(part, f"Line {number} of {of} is left out: {reason(error)}.")
        return parsed


def reason(error: Exception) -> str:
    """The error's message, short; for a schema the first wrong field."""
    if not isinstance(error, ValidationError):
        return one_line(error)
    first = error.errors()[0]
    return ": ".join(part for part in (".".join(map(str, first["loc"])), first["msg"]) if part)


def file_name(text: str) -> str:
    """The text with a hyphen for whatever does not belong in a file's name."""
    return re.sub(r"[^\w.-]", "-", text)
