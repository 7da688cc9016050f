"""Marks that several figures share: empty figures, dashes, plain ticks."""

from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from reports.numbers import compact

WIDE, COLUMN = 10.6, 4.5
"""Inches of a figure as wide as the page, and of one of which two stand beside each other."""
DASHES = (0, (4, 2.2))
"""Dashes of published and computed lines and of thresholds."""


def blank(height: float, width: float = WIDE) -> Figure:
    """An empty figure; sizes are in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def plain_log_ticks(axes: Axes, which: Literal["x", "y"] = "y") -> None:
    """Make an axis logarithmic, with plain numbers at 1, 2 and 5 of each decade."""
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=20))
    axis.set_major_formatter(lambda value, _: compact(float(f"{value:.6g}")))
    axis.set_minor_locator(NullLocator())
