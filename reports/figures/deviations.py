"""How far the numbers that were found lie from the published ones, a row for each paper."""

from collections.abc import Mapping, Sequence
from textwrap import fill

from matplotlib.figure import Figure

from experiments.verdicts import Outcome
from reports.figures.marks import blank
from reports.style import LIGHT, LOOKS

NAME_CHARACTERS = 22
GOLDEN = 0.618034
"""Successive multiples of it, less whole numbers, are spread evenly however many there are."""


def draw(rows: Mapping[str, Sequence[tuple[Outcome, float]]], narrow: bool = True) -> Figure:
    """A mark for each number at its deviation in per cent: linear within 1 %, logarithmic beyond."""
    figure = blank(narrow, 1.0 + 0.52 * len(rows))
    axes = figure.add_subplot()
    for outcome, look in LOOKS.items():
        spots = [
            (deviation, place + 0.66 * (number * GOLDEN % 1 - 0.5))
            for place, marks in enumerate(rows.values())
            for number, (mine, deviation) in enumerate(marks) if mine == outcome
        ]  # fmt: skip
        if spots:
            color = LIGHT[look.color]
            axes.plot(*zip(*spots, strict=True), look.marker, color=color, markersize=4, markeredgewidth=0.9, alpha=0.8,
                      markerfacecolor=color if look.group == "measured" else "none",
                      label=outcome.replace("_", " ").lower())  # fmt: skip
    axes.axvline(0, color=LIGHT["ink"], linewidth=0.8, zorder=1)
    axes.set_xscale("symlog", linthresh=1, linscale=0.6)
    ticks = [-100, -10, -1, 0, 1, 10, 100]
    axes.set_xticks(ticks, [f"{tick:+d} %" if tick else "0" for tick in ticks])
    axes.minorticks_off()
    reach = 1.25 * max(10.0, *(abs(deviation) for marks in rows.values() for *_, deviation in marks))
    axes.set_xlim(-reach, reach)
    axes.set_yticks(range(len(rows)), [fill(name, NAME_CHARACTERS) for name in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("found here against published")
    figure.legend(loc="outside upper left", ncols=3, columnspacing=1.2, handletextpad=0.2)
    return figure
