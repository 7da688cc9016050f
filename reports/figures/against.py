"""Differences of two engines over iterations, under their tolerance."""

from typing import TYPE_CHECKING

from lineage.benchmark import Benchmark
from reports.figures.marks import blank
from reports.style import LIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUANTITIES = ("loss", "gradient norm")


def draw(result: Benchmark, narrow: bool = False) -> "Figure":
    """A panel for the losses and one for the gradient norms: a dot for each iteration, the tolerance as a band."""
    from matplotlib.ticker import FuncFormatter

    figure = blank(narrow, 5.4 if narrow else 3.4)
    panels = figure.subplots(2, 1) if narrow else figure.subplots(1, 2)
    for axes, case in zip(panels, (one for one in result.cases if one.name in QUANTITIES), strict=True):
        curves = {series.contender: series.samples for series in case.series}
        iterations = range(1, len(curves["difference"]) + 1)
        floor = min([value for name in ("difference", "tolerance") for value in curves[name] if value > 0]) / 2
        allowed = [max(value, floor) for value in curves["tolerance"]]
        axes.fill_between(iterations, floor, allowed, color=LIGHT["dropped"], alpha=0.5, linewidth=0, label="tolerance")
        apart = [max(value, floor) for value in curves["difference"]]
        axes.plot(iterations, apart, ".", color=LIGHT["model-2"], markersize=3, label="difference, or none at the foot")
        axes.set_yscale("log")
        axes.set_ylim(bottom=floor)
        axes.set_xlabel("iteration")
        axes.set_ylabel(f"difference of the {case.name}")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return figure
