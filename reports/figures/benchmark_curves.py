"""What a benchmark measured along an axis: rates and memory against a size, beside limits and closed forms."""

from typing import TYPE_CHECKING

from lineage.benchmark import Benchmark, samples
from reports.figures.marks import blank
from reports.numbers import compact
from reports.style import LIGHT, look

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOGARITHMIC_ABOVE = 4.0
"""Times that a panel's largest value is its smallest."""
COLUMNS = 5


def draw(result: Benchmark, narrow: bool = False) -> "Figure":
    """A panel for each axis and measure: medians with the rounds' range; limits and closed forms dashed."""
    frame = samples(result)
    panels = list(frame[frame["axis"] != ""].groupby(["axis", "measure", "unit"], sort=False))
    columns = 1 if narrow else min(len(panels), COLUMNS)
    rows = -(-len(panels) // columns)
    figure = blank(narrow, (2.9 if columns > 2 else 3.4) * rows)
    places = figure.subplots(rows, columns, squeeze=False).flat
    for axes, ((axis, measure, unit), part) in zip(places, panels, strict=False):
        _panel(axes, part)
        axes.set_xlabel(axis)
        axes.set_title(f"{measure}, {unit}" if unit else measure)
    for axes in [*places]:
        axes.set_axis_off()
    return figure


def _panel(axes: "Axes", part: "pd.DataFrame") -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for rank, ((contender, kind), curve) in enumerate(part.groupby(["contender", "kind"], sort=False)):
        points = curve.groupby("at")["value"].agg(["median", "min", "max"])
        color, marker = (LIGHT["muted"], "") if kind == "computed" else look(rank)
        style = (0, (4, 2.2)) if kind == "computed" else "-"
        axes.plot(points.index, points["median"], color=color, marker=marker, markersize=4.5, linewidth=1.3,
                  linestyle=style, label=contender)  # fmt: skip
        axes.vlines(points.index, points["min"], points["max"], color=color, linewidth=2.6, alpha=0.5)
    sizes = sorted(part["at"].unique())
    axes.set_xscale("log")
    axes.set_xticks(sizes, [compact(float(f"{size:.4g}")) for size in sizes])
    if part["value"].min() > 0 and part["value"].max() > LOGARITHMIC_ABOVE * part["value"].min():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(0, 1.15 * part["value"].max())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(float(f"{value:.6g}"))))
    axes.legend(loc="best")
