"""Exhibits, the parts of the page, each with a caption, data and the command that reproduces it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from mlm_repro.experiments.benchmark import Table as Table
from mlm_repro.reports.figures import Panel

SENTENCE = re.compile(r"(?<=[\w)%”][.?])\s+(?=[A-Z“])")
"""Matches the space between two sentences."""
NUMERIC = ("x", "value", "low", "high", "seed")
"""Heads of the columns of records in an exhibit's data that hold numbers."""


@dataclass(frozen=True)
class Exhibit:
    """Figure, tables or both on the page, with caption, data and command."""

    name: str
    """Id of the exhibit on the page and name of its files without ending."""
    title: str
    caption: Sequence[str]
    """Sentences that are computed from the data; the page shows two, and folds the others and the
    notes."""
    data: Table
    """Numbers as recorded, the content of the file NAME.csv."""
    command: str = ""
    """Command line that reproduces the exhibit's numbers; empty if it is not known."""
    panels: Sequence[Panel] = ()
    """Panels of the exhibit's figure; empty if it has no figure."""
    alt: str = ""
    """Text alternative of the exhibit's figure; empty if it has no figure."""
    tables: Sequence[Table] = ()
    """Tables that the page shows in the exhibit."""
    notes: Sequence[str] = ()
    """Sentences on the measurement, which the page folds."""
    missing: str = ""
    """Sentence that says that no run was given, so that the exhibit has published numbers alone;
    else empty."""
    column: bool = False
    """True for a figure of column width, two of which stand beside each other on a wide page."""

    @property
    def said(self) -> tuple[list[str], list[str]]:
        """Pair of lists of sentences: the caption's first two, which the page shows, and all its
        other sentences with the notes."""
        every = list(chain.from_iterable(map(SENTENCE.split, self.caption)))
        return every[:2], [*every[2:], *self.notes]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Tuple of the kinds of the exhibit's numbers, such as measured, each once in the order of
        the data; empty if the data have no column `kind`."""
        if "kind" not in self.data.heads:
            return ()
        column = self.data.heads.index("kind")
        return tuple(dict.fromkeys(row[column] for row in self.data.rows))

    @property
    def numbers(self) -> tuple[dict[str, str], Table]:
        """Pair of the exhibit's data, which must be rows of records, for the page: a dict head →
        cell, of the cells that are the same in every row, without empty ones; and a Table of the
        other columns, words before numbers. Digests in the table are cut to 16 characters. Raises
        ValueError without a row."""
        columns = dict(zip(self.data.heads, zip(*self.data.rows, strict=True), strict=True))
        shared = {head: cells[0] for head, cells in columns.items() if len(set(cells)) == 1}
        words = [head for head in columns if head not in shared and head not in NUMERIC]
        heads = [*words, *(head for head in NUMERIC if head in columns and head not in shared)]
        shown = [
            [cell[:16] for cell in columns[head]] if head == "digest" else columns[head]
            for head in heads
        ]
        table = Table(heads, [*zip(*shown, strict=True)], len(words))
        return {head: cell for head, cell in shared.items() if cell}, table
