"""Results of training, kernels, growth and their comparison as tables on the terminal."""

from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table


def show_train(result: dict[str, Any]) -> None:
    """Print every goal with its figure, the rates, the limits, where the time went, and the notes."""
    console = Console()
    goals = Table(title=f"Goals, median of {result['rounds']} rounds", title_justify="left")
    for name in ("case", "measure"):
        goals.add_column(name)
    for name in ("goal", "figure", "least to most", "met"):
        goals.add_column(name, justify="right", no_wrap=True)
    for row in [*result["cases"], result["layouts"]]:
        for name, goal in row["goals"].items():
            spread = row["each_round"][name]
            figures = [f"{goal:g}", f"{row['ratios'][name]:.2f}", f"{min(spread):.2f} to {max(spread):.2f}"]
            goals.add_row(row["case"], result["measures"][name], *figures, "met" if row["reached"][name] else "not met")
    console.print(goals)
    rates = Table(title="Training, tokens per processor second", title_justify="left")
    rates.add_column("case")
    for name in ("ours", "stock", "tuned", "limit"):
        rates.add_column(name, justify="right")
    for row in result["cases"]:
        cells = [f"{median(many):,.0f}" for many in row["cpu_tokens_per_second"].values()]
        rates.add_row(row["case"], *cells, f"{row['limit_tokens_per_second']:,.0f}")
    console.print(rates)
    spent = result["where_time_went"]
    shares = ", ".join(f"{name} {share:.0%}" for name, share in spent["shares"].items())
    console.print(f"Where the time went ({spent['case']}): {shares}", highlight=False, markup=False)
    gflops: dict[str, float] = {}
    for row in result["cases"]:
        precision = row["model"]["precision"]
        gflops[precision] = max(gflops.get(precision, 0.0), *row["gemm_gflops"])
    limits = ", ".join(f"{name} products {rate:,.0f} GFLOP/s" for name, rate in gflops.items())
    console.print(f"Limits: {limits}; copying {result['copy_gigabytes_per_second']:.1f} GB/s", highlight=False)
    ideal = result["layouts"]["pp2_ideal"]
    console.print(f"The operations' division over two stages allows pp2 {ideal:.2f} × one process", highlight=False)
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


def show_growth(result: dict[str, Any]) -> None:
    """Print every point's rate, what the closed form predicts for it, and the notes."""
    console = Console()
    table = Table(title=f"Growth of cost, median of {result['rounds']} rounds", title_justify="left")
    table.add_column("axis")
    for name in ("value", "tokens/s", "predicted", "measured ÷ predicted"):
        table.add_column(name, justify="right")
    for row in result["points"]:
        rate = median(row["tokens_per_second"])
        table.add_row(
            row["axis"], f"{row['value']:,}", f"{rate:,.0f}", f"{row['predicted']:,.0f}",
            f"{row['ratio']:.2f}",
        )  # fmt: skip
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
