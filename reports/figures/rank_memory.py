"""Peak memory of every rank beside the closed form."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from lineage.files import Memory
from reports.figures.marks import blank
from reports.style import LIGHT


def draw(runs: Mapping[str, Memory], narrow: bool = False) -> Figure:
    """A bar for the formula of each run and a mark for each of its ranks."""
    figure = blank(narrow, 1.1 + 0.42 * len(runs))
    axes = figure.add_subplot()
    bar: Any = {"facecolor": LIGHT["dropped"], "edgecolor": LIGHT["ink"], "linewidth": 0.6}
    mark: Any = {"color": LIGHT["model-0"], "markeredgecolor": LIGHT["ink"], "markersize": 6, "linestyle": "none"}
    for place, memory in enumerate(runs.values()):
        labels = ("_", "_") if place else ("closed form", "measured, a rank")
        axes.barh(place, memory.closed_form_bytes / 1e6, height=0.62, label=labels[0], **bar)
        megabytes = [value / 1e6 for value in memory.measured_bytes]
        axes.plot(megabytes, [place] * len(megabytes), "D", label=labels[1], **mark)
    axes.set_yticks(range(len(runs)), list(runs))
    axes.set_ylim(len(runs) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel("megabytes per rank")
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside upper left", ncols=2)
    return figure
