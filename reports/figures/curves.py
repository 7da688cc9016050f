"""Figures of models: training loss, and six panels of training."""

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reports.curves import Curve
from reports.figures.marks import blank, end_labels, key_line, plain_log_ticks, plot_curve
from reports.numbers import compact
from reports.style import look

SMOOTH_ABOVE = 80
"""Points above which a curve is drawn faint, under its running mean."""


def draw_loss(curves: Sequence[Curve], narrow: bool = False) -> Figure:
    """Draw loss against iterations; long curves faint under a running mean, labelled with its last value."""
    figure = blank(narrow, 4.0 if narrow else 4.4)
    axes = figure.add_subplot()
    ends = []
    for curve in curves:
        means = _faint_and_mean(axes, curve)
        plot_curve(axes, curve.x, means, curve, markers=9)
        ends.append((curve, means[-1]))
    axes.set_xlim(0, max(curve.last_x for curve in curves))
    axes.set_xlabel("iteration")
    axes.set_ylabel("training loss (nats per token)")
    axes.xaxis.set_major_formatter(lambda value, _: compact(value))
    end_labels(axes, ends, gap=0.075 if narrow else 0.06)
    _add_key(figure, curves)
    return figure


def draw_panels(panels: Mapping[str, Sequence[Curve]], narrow: bool = False) -> Figure:
    """Draw a panel for each title with a curve for each model, three in a row on a wide page."""
    columns = 1 if narrow else 3
    rows = -(-len(panels) // columns)
    figure = blank(narrow, (2.1 if narrow else 2.75) * rows)
    for place, (title, curves) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, columns, place, title=title)
        for curve in curves:
            color, marker = look(curve.rank)
            means, width = _faint_and_mean(axes, curve), max(1.0, 1.9 - 0.3 * curve.rank)
            every = max(1, len(curve.x) // 6)
            axes.plot(curve.x, means, color=color, linewidth=width, marker=marker, markersize=3.6, markevery=every)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: compact(value))
        if "perplexity" in title:
            plain_log_ticks(axes)
        if title.startswith(("tokens", "share", "TFLOP")):
            axes.set_ylim(bottom=0)
        if place > len(panels) - columns:
            axes.set_xlabel("iteration")
    models = {curve.series: curve for curves in panels.values() for curve in curves}
    _add_key(figure, sorted(models.values(), key=lambda curve: curve.rank))
    return figure


def mean_window(curve: Curve) -> int:
    """Number of points in the running mean of a curve; 1 if the curve is drawn as it is."""
    return len(curve.x) // 25 if len(curve.x) > SMOOTH_ABOVE else 1


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to `window - 1` values before it."""
    means: list[float] = pd.Series(values).rolling(window, min_periods=1).mean().tolist()
    return means


def _faint_and_mean(axes: Axes, curve: Curve) -> list[float]:
    """Draw a long curve faint, and return the values to draw strong over it."""
    window = mean_window(curve)
    if window > 1:
        axes.plot(curve.x, curve.y, color=look(curve.rank).color, linewidth=0.5, alpha=0.35)
    return running_mean(curve.y, window)


def _add_key(figure: Figure, curves: Sequence[Curve]) -> None:
    figure.legend(handles=[key_line(curve) for curve in curves], loc="outside upper left", ncols=5, columnspacing=1.4)
