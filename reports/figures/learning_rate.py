"""Loss against a rising learning rate."""

from typing import TYPE_CHECKING

from lineage.files import LearningRate
from reports.figures.marks import blank
from reports.style import LIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(result: LearningRate, narrow: bool = False) -> "Figure":
    """Every loss faint, the smoothed ones strong, with the lowest and the suggested rate marked."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure = blank(narrow, 3.3)
    axes = figure.subplots()
    axes.plot(result.rates, result.losses, color=LIGHT["dropped"], linewidth=0.9, label="each iteration")
    axes.plot(result.rates, result.smoothed, color=LIGHT["model-2"], linewidth=1.8, label="smoothed")
    if result.lowest_rate and result.suggestion:
        axes.axvline(result.lowest_rate, color=LIGHT["muted"], linewidth=1, linestyle=(0, (1, 1.2)), label="lowest")
        axes.axvline(result.suggestion, color=LIGHT["good"], linewidth=1.4, linestyle=(0, (4, 2.2)), label="suggested")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    lowest, first = min(result.smoothed), result.losses[0]
    axes.set_ylim(lowest - 0.1 * (first - lowest) - 0.01, 1.15 * first)
    axes.set_xlabel("learning rate (logarithmic)")
    axes.set_ylabel("training loss")
    axes.legend(loc="best")
    return figure
