"""A result on the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from lineage.benchmark import Benchmark, TextTable, sentences, setting_lines, tables


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
