"""Prints the rates of matrix products."""

from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table


def show_gemm(result: dict[str, Any]) -> None:
    """A line for each precision and size: GFLOP/s one below a multiple of 8, at it, and one above."""
    table = Table(title=f"products of n × n matrices, GFLOP/s: {result['device']}")
    for head in ("precision", "n", "n − 1", "n", "n + 1"):
        table.add_column(head, justify="left" if head == "precision" else "right")
    rates = {(one["precision"], one["size"], one["offset"]): median(one["gflops"]) for one in result["points"]}
    for precision, size in dict.fromkeys((precision, size) for precision, size, _ in rates):
        table.add_row(precision, f"{size:,}", *(f"{rates[precision, size, offset]:,.1f}" for offset in (-1, 0, 1)))
    console = Console()
    console.print(table)
    for precision, ratios in result["ratios"].items():
        console.print(f"{precision}: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))
