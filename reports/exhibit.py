"""Parts of the page: sections of exhibits; an exhibit has a caption, data and the command that makes it again."""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from lineage.numbers import csv_cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[[bool], "Figure"]
"""Draws a figure for a wide page, or for a column of 4.5 inches if given True."""
ORIGIN = ("kind", "source", "digest")
"""Columns of a number's origin."""


@dataclass(frozen=True)
class Table:
    """Cells as text under their heads. The first `words` columns hold words, the others numbers."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    title: str = ""

    @property
    def csv(self) -> str:
        """Comma-separated values with a line of heads."""
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows(
            [csv_cell(cell) for cell in row] for row in (self.heads, *self.rows)
        )
        return buffer.getvalue()

    @property
    def latex(self) -> str:
        """A LaTeX tabular that needs no package."""
        columns = "l" * self.words + "r" * (len(self.heads) - self.words)
        body = [f"{' & '.join(map(_latex, row))} \\\\" for row in self.rows]
        begin, heads = f"\\begin{{tabular}}{{{columns}}}", f"{' & '.join(map(_latex, self.heads))} \\\\"
        title = [f"% {' '.join(self.title.split())}"] if self.title else []
        return "\n".join([*title, begin, "\\hline", heads, "\\hline", *body, "\\hline", "\\end{tabular}"]) + "\n"


@dataclass(frozen=True)
class Exhibit:
    """A figure, tables or both, with caption, data and command."""

    name: str
    """Id on the page and name of the files."""
    title: str
    caption: Sequence[str]
    """Sentences that are computed from the data."""
    data: Table
    """Numbers as recorded, the content of NAME.csv."""
    command: str = ""
    """Command that makes the numbers again; empty if it is not known."""
    draw: Draw | None = None
    alt: str = ""
    """Text alternative of the figure."""
    tables: Sequence[Table] = ()
    """Tables on the page, which NAME.tex holds too."""
    notes: Sequence[str] = ()
    """Sentences on the measurement, folded on the page."""
    problems: Sequence[str] = ()
    """Sentences on missing parts."""
    column: bool = False
    """True for a figure of column width, two of which stand beside each other on a wide page."""

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
        """Kinds of numbers, if the data name them."""
        if "kind" not in self.data.heads:
            return ()
        place = self.data.heads.index("kind")
        return tuple(dict.fromkeys(row[place] for row in self.data.rows))

    @property
    def numbers(self) -> "NumberGroups":
        """Data by origin, without the columns that are the same in every row."""
        heads, rows = self.data.heads, self.data.rows
        origin = [place for place, head in enumerate(heads) if head in ORIGIN]
        alike = {
            place: rows[0][place] for place, head in enumerate(heads)
            if place not in origin and head != "value" and len({row[place] for row in rows}) == 1
        }  # fmt: skip
        varying = [place for place in range(len(heads)) if place not in alike and place not in origin]
        groups: dict[tuple[str, ...], list[list[str]]] = {}
        for row in rows:
            groups.setdefault(tuple(row[place] for place in origin), []).append([row[place] for place in varying])
        constant = {heads[place]: cell for place, cell in alike.items() if cell}
        return NumberGroups(constant, [heads[place] for place in origin], [heads[place] for place in varying], groups)


class NumberGroups(NamedTuple):
    """Data of an exhibit as the page lists them."""

    constant: dict[str, str]
    """Cells that are the same in every row, by head."""
    origin: Sequence[str]
    """Heads of the columns that the groups share."""
    heads: Sequence[str]
    groups: dict[tuple[str, ...], list[list[str]]]


@dataclass(frozen=True)
class Section:
    """A part of the page under one heading."""

    name: str
    title: str
    exhibits: Sequence[Exhibit]
    problems: Sequence[str] = ()
    """Sentences on missing or unreadable parts."""


_LATEX = {**{sign: f"\\{sign}" for sign in "&%$#_{}"}, "\\": "\\textbackslash{}", "~": "\\textasciitilde{}",
          "^": "\\textasciicircum{}", "\n": " "}  # fmt: skip


def _latex(cell: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in cell)
