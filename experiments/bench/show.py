"""A result on the terminal, by itself or beside an older one of the same benchmark."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from lineage.benchmark import Benchmark, TextTable, ratios, read_benchmark, sentences, setting_lines, tables
from lineage.errors import BadInput

if TYPE_CHECKING:
    import pandas as pd

ALLOWED_FALL = 0.10
"""Part of a ratio that may be lost before it is flagged."""


def show(result: Benchmark) -> None:
    """Print what all cases have in common, the tables, what they say, and how it was measured."""
    say([f"{result.title}", *setting_lines(result)])
    for table in tables(result):
        show_rows(table)
    say([f"- {line}" for line in (*sentences(result), *result.disagreements, *result.notes)])


def show_rows(rows: TextTable) -> None:
    """Print a table, its numbers to the right."""
    table = Table(title=rows.title, title_justify="left")
    for place, head in enumerate(rows.heads):
        table.add_column(head, justify="left" if place < rows.words else "right")
    for cells in rows.rows:
        table.add_row(*cells)
    Console(markup=False).print(table)


def say(lines: Sequence[str]) -> None:
    """Print lines as they are."""
    Console(markup=False, highlight=False).print("\n".join(lines), soft_wrap=True)


def compare(old: Path, new: Path) -> "pd.DataFrame":
    """A row for each ratio that both files have: case, name, both values, the part lost, and whether it fell too far.

    Raises BadInput where a file is not a result, where they are of different benchmarks, or have no ratio in common.
    """
    before, after = read_benchmark(old), read_benchmark(new)
    if before.benchmark != after.benchmark:
        raise BadInput(f"{old} is of {before.benchmark!r}, {new} of {after.benchmark!r}")
    rows = ratios(before).merge(ratios(after), on=["case", "name"], suffixes=("_old", "_new"))
    rows = rows[rows["value_old"] > 0]
    if rows.empty:
        raise BadInput(f"{old} and {new} have no ratio in common")
    gained = rows["value_new"] / rows["value_old"] - 1
    rows["lost"] = gained.where([ratio.less_is_better for ratio in rows["ratio_new"]], -gained)
    rows["fell"] = rows["lost"] > ALLOWED_FALL
    return rows


def comparison_table(rows: "pd.DataFrame") -> TextTable:
    """The rows as text."""
    cells = [
        (row.case, row.name, f"{row.value_old:.3f}", f"{row.value_new:.3f}", f"{row.lost:.1%}{' fell' * row.fell}")
        for row in rows.itertuples(index=False)
    ]
    return TextTable(("case", "ratio", "old", "new", "lost"), cells, 2, "")


def differing_machines(old: Path, new: Path) -> str:
    """A sentence if the two results are of different machines, as far as they say."""
    first, other = (read_benchmark(path).environment.machine for path in (old, new))
    return "" if first == other else f"the machines differ, and ratios with them: {first}; then {other}"
