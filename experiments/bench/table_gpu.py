"""The GPU benchmark's result as tables on the terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table


def show_gpu(result: dict[str, Any]) -> None:
    """Print the limits, kernels with their floors, training with its goals, and the notes."""
    console, limits = Console(), result["limits"]
    console.print(
        f"Limits: copying {limits['copied_bytes_per_second'] / 1e9:,.0f} GB/s, bf16 products "
        f"{limits['operations_per_second'] / 1e12:,.0f} TFLOP/s",
        highlight=False,
    )
    kernels = Table(title="Kernels, forward and backward, bf16", title_justify="left")
    kernels.add_column("kernel")
    for name in ("ours, ms", "floor ÷ ours", "torch.compile ÷ ours", "reference ÷ ours", "largest error ÷ reference's"):
        kernels.add_column(name, justify="right")
    errors = {row["kernel"]: row["error_ratio"] for row in result["exactness"]}
    for row in result["kernels"]:
        cells = [_with_goal(row, name) for name in ("to_floor", "to_torch.compile", "to_reference")]
        error = f"{errors[row['kernel'] + ' bfloat16']:.2f}"
        kernels.add_row(row["kernel"], f"{row['milliseconds']['ours']:,.3f}", *cells, error)
    console.print(kernels)
    training = Table(title="Training, bf16, dropout 0.1", title_justify="left")
    for name in ("model", "contender"):
        training.add_column(name)
    for name in ("tokens/s", "utilisation", "peak GB", "ours ÷ it"):
        training.add_column(name, justify="right")
    for row in result["training"]:
        for name, many in row["tokens_per_second"].items():
            rate = f"{sorted(many)[len(many) // 2]:,.0f}"
            used = _with_goal(row, "utilisation") if name == "ours" else f"{row['utilisation'][name]:.2f}"
            peak = f"{row['peak_bytes'][name] / 1e9:,.0f}"
            training.add_row(row["case"], name, rate, used, peak, _with_goal(row, f"to_{name}"))
        for name, sentence in row["failures"].items():
            training.add_row(row["case"], name, sentence)
    largest = result["forward_backward"]
    training.add_row(
        "8.3b, forward and backward", "ours", f"{largest['tokens_per_second']:,.0f}",
        f"{largest['utilisation']:.2f}", f"{largest['peak_bytes'] / 1e9:,.0f}",
    )  # fmt: skip
    console.print(training)
    for note in result["notes"]:
        console.print(f"- {note}", highlight=False, markup=False)


def _with_goal(row: dict[str, Any], name: str) -> str:
    if name not in row["ratios"]:
        return ""
    figure = f"{row['ratios'][name]:.2f}"
    if name not in row["goals"]:
        return figure
    return f"{figure} (goal {row['goals'][name]:g}{'' if row['reached'][name] else ', missed'})"
