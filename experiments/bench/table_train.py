"""Results of training, kernels and their comparison as tables on the terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table

COLUMNS = {
    "to_stock": "÷ stock", "to_tuned": "÷ tuned", "to_limit": "÷ limit", "memory_to_stock": "memory ÷ stock",
}  # fmt: skip


def show_train(result: dict[str, Any]) -> None:
    """Print every case with its goals, the layouts, the limits, where the time went, and the notes."""
    console = Console()
    table = Table(title="Training, tokens per processor second", title_justify="left")
    table.add_column("case")
    for name in ("ours", "stock", "tuned", "limit", *COLUMNS.values()):
        table.add_column(name, justify="right")
    for row in result["cases"]:
        rates = [f"{sorted(many)[len(many) // 2]:,.0f}" for many in row["cpu_tokens_per_second"].values()]
        cells = [_with_goal(row, name) for name in COLUMNS]
        table.add_row(row["case"], *rates, f"{row['limit_tokens_per_second']:,.0f}", *cells)
    console.print(table)
    layouts = result["layouts"]
    for name in layouts["goals"]:
        of = f" of the ideal {layouts['pp2_ideal']:.2f}" if name == "pp2" else " × one process"
        console.print(f"{name}: {_with_goal(layouts, name)}{of}", highlight=False)
    spent = result["where_time_went"]
    shares = ", ".join(f"{name} {share:.0%}" for name, share in spent["shares"].items())
    console.print(f"Where the time went ({spent['case']}): {shares}", highlight=False, markup=False)
    gflops = {row["case"].split()[1]: row["gemm_gflops"] for row in result["cases"]}
    limits = ", ".join(f"{name} products {max(rates):,.0f} GFLOP/s" for name, rates in gflops.items())
    console.print(f"Limits: {limits}; copying {result['copy_gigabytes_per_second']:.1f} GB/s", highlight=False)
    for note in result["notes"]:
        console.print(f"- {note}", highlight=False)


def show_kernels(result: dict[str, Any]) -> None:
    """Print each kernel's milliseconds and how many times faster than the others it is."""
    console = Console()
    table = Table(title="Kernels, forward and backward", title_justify="left")
    table.add_column("kernel")
    for name in ("ours, ms", "reference ÷ ours", "torch.compile ÷ ours"):
        table.add_column(name, justify="right")
    for row in result["kernels"]:
        others = [row["ratios"].get(name) for name in ("to_reference", "to_torch.compile")]
        cells = [f"{ratio:.2f}" if ratio else "" for ratio in others]
        table.add_row(row["kernel"], f"{row['milliseconds']['ours']:,.1f}", *cells)
    console.print(table)
    for note in result["notes"]:
        console.print(f"- {note}", highlight=False)


def show_comparison(rows: list[dict[str, Any]]) -> None:
    """Print every ratio of both results."""
    table = Table()
    table.add_column("ratio")
    for name in ("old", "new", "lost"):
        table.add_column(name, justify="right")
    for row in rows:
        lost = f"{row['lost']:.1%}{' fell' if row['fell'] else ''}"
        table.add_row(row["ratio"], f"{row['old']:.3f}", f"{row['new']:.3f}", lost)
    Console().print(table)


def _with_goal(row: dict[str, Any], name: str) -> str:
    figure = f"{row['ratios'][name]:.2f}"
    if name not in row["goals"]:
        return figure
    return f"{figure} (goal {row['goals'][name]:g}{'' if row['reached'][name] else ', missed'})"
