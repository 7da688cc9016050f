"""Perplexity of each article of a text, articles in the order of one model's perplexity."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reports.curves import Curve
from reports.figures.marks import blank, end_label, end_labels, key_line, plain_log_ticks
from reports.style import look

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(curves: Sequence[Curve], narrow: bool = False) -> "Figure":
    """A mark for each article and model."""
    figure = blank(narrow, 4.0 if narrow else 3.9)
    axes = figure.add_subplot()
    for curve in curves:
        color, marker = look(curve.rank)
        axes.plot(curve.x, curve.y, color=color, marker=marker, markersize=4.2, linewidth=0.8, clip_on=False)
    plain_log_ticks(axes)
    axes.set_xlim(0, max(max(curve.last_x for curve in curves), 1))
    axes.set_xlabel("articles, the easiest first")
    axes.set_ylabel("perplexity per sub-word")
    end_labels(axes, [end_label(curve) for curve in curves], gap=0.075 if narrow else 0.06)
    figure.legend(handles=[key_line(curve) for curve in curves], loc="outside upper left", ncols=5)
    return figure
