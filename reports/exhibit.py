"""What the page is made of: sections of exhibits, each with its caption, its data and the command that makes it."""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from lineage.numbers import csv_cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[[bool], "Figure"]
"""Draws for a wide page, or for a column of 4.5 inches when given True."""
ORIGIN = ("kind", "source", "digest")
"""Columns that say where a number comes from."""


@dataclass(frozen=True)
class Table:
    """Cells as text under their heads; the first `words` columns are words, the others numbers."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    title: str = ""

    @property
    def csv(self) -> str:
        """Comma-separated, under the heads."""
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows(
            [csv_cell(cell) for cell in row] for row in (self.heads, *self.rows)
        )
        return buffer.getvalue()

    @property
    def latex(self) -> str:
        """A tabular that needs no package."""
        columns = "l" * self.words + "r" * (len(self.heads) - self.words)
        body = [f"{' & '.join(map(_latex, row))} \\\\" for row in self.rows]
        begin, heads = f"\\begin{{tabular}}{{{columns}}}", f"{' & '.join(map(_latex, self.heads))} \\\\"
        title = [f"% {' '.join(self.title.split())}"] if self.title else []
        return "\n".join([*title, begin, "\\hline", heads, "\\hline", *body, "\\hline", "\\end{tabular}"]) + "\n"


@dataclass(frozen=True)
class Exhibit:
    """A figure, or tables, or both, with all that stands under it."""

    name: str
    """Id on the page and name of its files."""
    title: str
    caption: Sequence[str]
    """Sentences on what to see, written from the data."""
    data: Table
    """The numbers as recorded: what NAME.csv holds."""
    command: str = ""
    """Makes the numbers again; empty where that is not known."""
    draw: Draw | None = None
    alt: str = ""
    """Text alternative of the figure."""
    tables: Sequence[Table] = ()
    """Tables on the page, which NAME.tex holds too."""
    notes: Sequence[str] = ()
    """How it was measured, folded."""
    problems: Sequence[str] = ()
    """Sentences on what is missing here."""
    column: bool = False
    """Drawn at column width, two beside each other on a wide page."""

    @property
    def csv(self) -> bytes:
        """The content of NAME.csv."""
        return self.data.csv.encode("utf-8", "replace")

    @property
    def latex(self) -> bytes:
        """The content of NAME.tex."""
        return "\n".join(table.latex for table in self.tables).encode("utf-8", "replace")

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of numbers in it, if its data name them."""
        if "kind" not in self.data.heads:
            return ()
        place = self.data.heads.index("kind")
        return tuple(dict.fromkeys(row[place] for row in self.data.rows))

    @property
    def numbers(self) -> "NumberGroups":
        """The data by where they come from, without the columns that say the same in every line."""
        heads, rows = self.data.heads, self.data.rows
        origin = [place for place, head in enumerate(heads) if head in ORIGIN]
        alike = {
            place: rows[0][place] for place, head in enumerate(heads)
            if place not in origin and head != "value" and len({row[place] for row in rows}) == 1
        }  # fmt: skip
        kept = [place for place in range(len(heads)) if place not in alike and place not in origin]
        groups: dict[tuple[str, ...], list[list[str]]] = {}
        for row in rows:
            groups.setdefault(tuple(row[place] for place in origin), []).append([row[place] for place in kept])
        constant = {heads[place]: cell for place, cell in alike.items() if cell}
        return NumberGroups(constant, [heads[place] for place in origin], [heads[place] for place in kept], groups)


class NumberGroups(NamedTuple):
    """An exhibit's data as the page lists them."""

    constant: dict[str, str]
    """By their heads, cells that are the same in every line."""
    origin: Sequence[str]
    """Heads of what the groups are by."""
    heads: Sequence[str]
    groups: dict[tuple[str, ...], list[list[str]]]


@dataclass(frozen=True)
class Section:
    """A part of the page under one heading."""

    name: str
    title: str
    exhibits: Sequence[Exhibit]
    problems: Sequence[str] = ()
    """Sentences on what is missing here, or cannot be shown."""


_LATEX = {**{sign: f"\\{sign}" for sign in "&%$#_{}"}, "\\": "\\textbackslash{}", "~": "\\textasciitilde{}",
          "^": "\\textasciicircum{}", "\n": " "}  # fmt: skip


def _latex(cell: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in cell)
