"""Marks that several figures share: curves, labels at their ends, plain ticks, keys."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator
from scipy.optimize import isotonic_regression  # type: ignore[import-untyped]

from reports.curves import Curve
from reports.numbers import compact, show
from reports.style import LIGHT, look

WIDE, COLUMN = 10.6, 4.5
"""Inches of a figure as wide as the page, and of one of which two stand beside each other."""
DASHES = (0, (4, 2.2))
"""Dashes of published and computed lines and of thresholds."""


def blank(height: float, width: float = WIDE) -> Figure:
    """An empty figure; sizes are in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def plot_curve(axes: Axes, xs: Sequence[float], ys: Sequence[float], curve: Curve, markers: int = 10) -> None:
    """Draw a curve in its model's look: published thin, dashed, open markers; otherwise solid, filled markers.

    Larger models have thinner lines, so that a curve under another still shows.
    """
    color, marker = look(curve.rank)
    published = curve.kind == "published"
    axes.plot(
        xs,
        ys,
        color=color,
        linewidth=1.1 if published else max(1.2, 2.5 - 0.45 * curve.rank),
        linestyle=DASHES if published else "-",
        marker=marker,
        markersize=(4.2 if published else 5.0) + (1.0 if marker == "^" else 0.0),
        markerfacecolor=LIGHT["paper"] if published else color,
        markeredgecolor=color if published else LIGHT["paper"],
        markeredgewidth=0.9 if published else 0.7,
        markevery=max(1, len(xs) // markers),
        clip_on=False,
        zorder=3,
    )


def end_labels(axes: Axes, ends: Sequence[tuple[Curve, float]], gap: float = 0.05) -> None:
    """Label the ends of curves, at least `gap` of the axes' height apart; a hairline leads to a moved label."""
    transform = axes.transData + axes.transAxes.inverted()
    ordered = sorted(ends, key=lambda end: end[1])
    right = axes.get_xlim()[1]
    levels = [float(transform.transform((right, value))[1]) for _, value in ordered]
    for (curve, value), level, place in zip(ordered, levels, _spread(levels, gap), strict=True):
        color = look(curve.rank).color
        axes.annotate(
            f"{curve.series} {show(value)}",
            xy=(1.0, level),
            xytext=(1.035, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=color,
            fontsize=8.8,
            fontweight="bold",
            va="center",
            ha="left",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 1},
        )


def key_line(curve: Curve) -> Line2D:
    """Handle of a key: colour and marker of a model."""
    color, marker = look(curve.rank)
    return Line2D([], [], color=color, marker=marker, markersize=5, linewidth=2, label=curve.series)


def plain_log_ticks(axes: Axes, which: Literal["x", "y"] = "y") -> None:
    """Make an axis logarithmic, with plain numbers at 1, 2 and 5 of each decade."""
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=20))
    axis.set_major_formatter(lambda value, _: compact(float(f"{value:.6g}")))
    axis.set_minor_locator(NullLocator())


def _spread(levels: Sequence[float], gap: float) -> list[float]:
    """Move ascending levels to at least `gap` apart, with the least sum of squared moves."""
    steps = gap * np.arange(len(levels))
    places: list[float] = (isotonic_regression(np.asarray(levels) - steps).x + steps).tolist()
    return places
