"""Differences of two engines over iterations, under the tolerance."""

from typing import TYPE_CHECKING

from lineage.files import Against
from reports.figures.marks import blank
from reports.style import LIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = {"loss": "difference of the losses", "norm": "difference of the gradient norms"}


def draw(result: Against, narrow: bool = False) -> "Figure":
    """A panel for the losses and one for the gradient norms: a dot for each iteration, the tolerance as a band."""
    figure = blank(narrow, 5.4 if narrow else 3.4)
    panels = figure.subplots(2, 1) if narrow else figure.subplots(1, 2)
    for axes, curve in zip(panels, (one for one in result.curves if one.quantity in LABELS), strict=True):
        iterations = range(1, len(curve.ours) + 1)
        floor = min([value for value in (*curve.differences, *curve.tolerance) if value > 0], default=1e-12) / 2
        band = {"color": LIGHT["dropped"], "alpha": 0.5, "linewidth": 0}
        axes.fill_between(
            iterations, floor, [max(value, floor) for value in curve.tolerance], label="tolerance", **band
        )
        differences = [max(value, floor) for value in curve.differences]
        axes.plot(iterations, differences, ".", color=LIGHT["model-2"], markersize=3, label="difference")
        axes.set_yscale("log")
        axes.set_ylim(bottom=floor)
        axes.set_xlabel("iteration")
        axes.set_ylabel(LABELS[curve.quantity])
        axes.legend(loc="lower right")
    return figure
