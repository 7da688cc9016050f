"""A file as a function of files: what each kind of run declares of its files, and the one comparison with them."""

import math
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from mlm_repro.lineage.files import Manifest, one_line

SAME = 1e-9
"""Relative tolerance of a number that is computed again from rounded ones or on another processor."""
GIVES = "what it is made of gives"


class Checked(NamedTuple):
    """A run whose files are compared with what they are made of."""

    path: Path
    manifest: Manifest
    absent: list[str]
    """Names of what belongs to the run and is not on disk, to which a comparison adds."""


class Input(NamedTuple):
    """A run that another run is made of."""

    name: str
    """Name among the parents; empty for one whose digest is not among them."""
    place: Path
    digest: str
    """Digest of the place as it is here; empty without a seal."""


class Partly(dict[str, Any]):
    """Some keys of an object: its other keys follow from nothing here and are not compared."""


Derived = Callable[[Checked], Iterator[tuple[str, Any, Any]]]
"""Gives files, each with what it says and with what the files that it is made of give.

Raises UserError or ValueError for files of which nothing can be made.
"""


def unlike(where: str, said: object, gives: object, by: str = GIVES) -> Iterator[str]:
    """A sentence for each place of a stated value, such as a key of a file, that differs from what was made again."""
    said, gives = (value.model_dump() if isinstance(value, BaseModel) else value for value in (said, gives))
    if isinstance(said, dict) and isinstance(gives, dict):
        for key in gives if isinstance(gives, Partly) else {**said, **gives}:
            yield from unlike(f"{where}: {key}", said.get(key), gives.get(key), by)
    elif isinstance(said, list | tuple) and isinstance(gives, list | tuple):
        for number, pair in enumerate(zip_longest(said, gives), 1):
            label = next((each.label for each in pair if hasattr(each, "label")), "")
            yield from unlike(f"{where}: {label}" if label else f"{where}, {number}", *pair, by)
    elif isinstance(said, float | int) and isinstance(gives, float) and math.isclose(said, gives, rel_tol=SAME):
        return
    elif said != gives:
        yield f"{where} is {one_line(said)}; {by} {one_line(gives)}"
