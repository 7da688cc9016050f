"""Throughput and memory of the data pipeline against the size of its input."""

from statistics import median
from typing import TYPE_CHECKING

from reports.benchmark_results import TOLERANCE, DataScale
from reports.numbers import compact
from reports.style import LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(result: DataScale, narrow: bool = False) -> "Figure":
    """Throughput in the band around linear, and peak memory under its bound, over a logarithmic size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5, 6.0) if narrow else (10.6, 3.7), layout="constrained")
    left, right = figure.subplots(2, 1) if narrow else figure.subplots(1, 2)
    rows = sorted(result.rows, key=lambda row: row.megabytes)
    sizes = [row.megabytes for row in rows]
    rates = [row.megabytes_per_second for row in rows]
    middle = median(rates)
    band = ((1 - TOLERANCE) * middle, (1 + TOLERANCE) * middle)
    left.axhspan(*band, color=LIGHT["dropped"], alpha=0.35, linewidth=0, label=f"±{TOLERANCE:.0%} around linear")
    left.axhline(middle, color=LIGHT["muted"], linewidth=0.8, linestyle=(0, (4, 2.2)))
    left.plot(sizes, rates, "o-", color=LIGHT["model-2"], label="measured", zorder=3)
    left.set_ylim(0, max(band[1], *rates) * 1.12)
    left.set_title("throughput, MB/s per core")
    gigabytes = [row.peak_bytes / 1e9 for row in rows]
    bounds = [result.bound_of(row) / 1e9 for row in rows]
    right.plot(sizes, bounds, "s--", color=LIGHT["alert"], markersize=4, linewidth=1.1, label="stated bound")
    right.plot(sizes, gigabytes, "o-", color=LIGHT["kept"], label="measured peak", zorder=3)
    right.set_ylim(0, max(*gigabytes, *bounds) * 1.15)
    right.set_title("peak memory, GB")
    for axes in (left, right):
        _sizes(axes, sizes)
        axes.legend(loc="lower left")
    return figure


def _sizes(axes: "Axes", sizes: list[float]) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log")
    axes.set_xlim(min(sizes) / 1.5, max(sizes) * 1.5)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(sizes, [compact(float(f"{size:.3g}")) for size in sizes])
    axes.set_xlabel("input, MB (logarithmic)")
