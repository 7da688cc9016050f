"""A pipeline schedule: the engine's plan above the measured computations of each rank."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from engine.run.files import Computation, Timeline
from reports.figures.marks import blank
from reports.style import LIGHT

AXES_POINTS = {False: 690.0, True: 270.0}
"""Approximate width of the axes on a wide and on a narrow page."""
CHARACTER = 0.66
"""Width of a character over its font size."""


def draw(timeline: Timeline, narrow: bool = False) -> Figure:
    """Draw two bands, planned above measured: forward dark, backward light and hatched.

    The number is that of the microbatch; with several chunks their letter follows, and later chunks have an inner rule.
    """
    figure = blank(narrow, 1.85 + (0.4 if narrow else 0.48) * timeline.pp)
    planned, measured = figure.subplots(2, 1)
    name = f"{timeline.schedule}{f', {timeline.chunks} chunks' if timeline.chunks > 1 else ''}"
    _band(planned, f"{name}: planned, in forward passes", timeline.planned, timeline.chunks, narrow)
    _band(measured, "measured, in milliseconds", milliseconds(timeline.measured), timeline.chunks, narrow)
    key = [
        Patch(facecolor=LIGHT["kept"], edgecolor=LIGHT["paper"], label="forward"),
        Patch(facecolor=LIGHT["dropped"], edgecolor=LIGHT["ink"], hatch="////", linewidth=0.4, label="backward"),
    ]
    figure.legend(handles=key, loc="outside upper left", ncols=2)
    return figure


def milliseconds(ranks: Sequence[Sequence[Computation]]) -> list[list[Computation]]:
    """Timelines of seconds in milliseconds."""
    return [[(op, number, chunk, 1e3 * start, 1e3 * end) for op, number, chunk, start, end in rank] for rank in ranks]


def _band(axes: Axes, title: str, ranks: Sequence[Sequence[Computation]], chunks: int, narrow: bool) -> None:
    last = max(end for rank in ranks for *_, end in rank)
    size = (4.6 if len(ranks) > 2 else 5.4) if narrow else 6.8
    for place, rank in enumerate(ranks):
        for op, number, chunk, start, end in rank:
            forward = op == "F"
            ink, fill = LIGHT["paper" if forward else "ink"], LIGHT["kept" if forward else "dropped"]
            hatch = "" if forward else "////"
            axes.barh(place, end - start, left=start, height=0.86, facecolor=fill, edgecolor=ink, hatch=hatch,
                      linewidth=0.4)  # fmt: skip
            if chunk:
                axes.plot([start, end], [place - 0.3] * 2, color=ink, linewidth=0.9)
            label = f"{number}{chr(ord('a') + chunk % 26)}" if chunks > 1 else str(number)
            if (end - start) / last * AXES_POINTS[narrow] >= CHARACTER * size * len(label) + 1.5:
                box = None if forward else {"facecolor": fill, "edgecolor": "none", "pad": 0.6}
                axes.text((start + end) / 2, place, label, ha="center", va="center_baseline", fontsize=size, color=ink,
                          bbox=box)  # fmt: skip
    axes.set_title(title)
    axes.set_xlim(0, last)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_yticks(range(len(ranks)), [f"rank {place}" for place in range(len(ranks))])
    axes.xaxis.set_major_locator(MaxNLocator(5 if narrow else 9))
    axes.grid(visible=False)
