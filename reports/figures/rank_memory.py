"""Peak memory of every rank beside the closed form."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from reports.figures.marks import blank
from reports.style import LIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class RankMemory(NamedTuple):
    """A run's memory per rank, in bytes."""

    name: str
    closed_form: int
    measured: Sequence[int]


def draw(runs: Sequence[RankMemory], narrow: bool = False) -> "Figure":
    """A bar for the formula of each run and a mark for each of its ranks."""
    figure = blank(narrow, 1.1 + 0.42 * len(runs))
    axes = figure.add_subplot()
    for place, run in enumerate(runs):
        labels = ("_", "_") if place else ("closed form", "measured, a rank")
        look: Any = {"facecolor": LIGHT["dropped"], "edgecolor": LIGHT["ink"], "linewidth": 0.6}
        axes.barh(place, run.closed_form / 1e6, height=0.62, label=labels[0], **look)
        megabytes = [value / 1e6 for value in run.measured]
        look = {"color": LIGHT["model-0"], "markeredgecolor": LIGHT["ink"], "markersize": 6, "linestyle": "none"}
        axes.plot(megabytes, [place] * len(megabytes), "D", label=labels[1], **look)
    axes.set_yticks(range(len(runs)), [run.name for run in runs])
    axes.set_ylim(len(runs) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel("megabytes per rank")
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside upper left", ncols=2)
    return figure
