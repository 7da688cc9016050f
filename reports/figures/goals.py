"""Ratios of a benchmark as shares of their goals."""

from textwrap import fill
from typing import TYPE_CHECKING

from lineage.benchmark import Benchmark
from reports.figures.marks import blank
from reports.numbers import compact
from reports.style import LIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME_CHARACTERS = {False: 72, True: 30}
"""Of a line of a name on a wide and on a narrow page."""
LOGARITHMIC_ABOVE = 4.0
"""Times a goal that the best reaches."""


def draw(result: Benchmark, narrow: bool = False) -> "Figure":
    """A row for each goal: the value's share of it with the rounds' range, at 1 the goal; more is better."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    goals = [(case.name, ratio) for case in result.cases for ratio in case.ratios if ratio.goal is not None]
    names = [fill(f"{case}: {ratio.name}", NAME_CHARACTERS[narrow]) for case, ratio in goals]
    height = 0.8 + sum(0.14 + 0.16 * (1 + name.count("\n")) for name in names)
    figure = blank(narrow, height)
    axes = figure.subplots()
    for place, (_, ratio) in enumerate(goals):
        shares = [ratio.share(value) for value in ratio.rounds or [ratio.value]]
        color = LIGHT["good" if ratio.is_reached else "alert"]
        axes.plot([min(shares), max(shares)], [place, place], color=color, linewidth=2.6, alpha=0.5)
        marker = "o" if ratio.is_reached else "s"
        axes.plot(ratio.share(ratio.value), place, marker, color=color, markersize=5, zorder=3)
    axes.axvline(1.0, color=LIGHT["ink"], linewidth=0.9)
    axes.set_yticks(range(len(goals)), names)
    axes.invert_yaxis()
    if max(ratio.share(ratio.value) for _, ratio in goals) > LOGARITHMIC_ABOVE:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(float(f"{value:.6g}"))))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(left=0)
    axes.set_xlabel("share of the goal (1: reached)")
    return figure
