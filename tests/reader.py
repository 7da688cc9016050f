"""What reads a kind of file from outside, and a valid one to damage."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.damage import PLAIN, Form


class Reader(NamedTuple):
    """What reads a kind of file."""

    name: str
    prepare: Callable[[Path], Path]
    """Makes a folder with a valid file in it and returns that file."""
    read: Callable[[Path], object]
    """Reads the file; raises one of `mlm_repro.lineage.errors` if it cannot be used."""
    cases: int = 200
    """Its share of a record's; a test tries a quarter, and 20 at least."""
    form: Form = PLAIN


def bytes_at(name: str, content: bytes) -> Callable[[Path], Path]:
    """A folder with one file."""

    def prepare(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return prepare
