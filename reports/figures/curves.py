"""Figures of models: validation perplexity and training loss over iterations."""

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


def draw_perplexity(layers: Mapping[str, Sequence[Curve]]) -> Figure:
    """Draw a panel with axes of its own for each layer: curves with the bands of their seeds, logarithmic."""
    figure = blank(4.4)
    panels = figure.subplots(1, len(layers), squeeze=False)[0]
    for axes, (name, curves) in zip(panels, layers.items(), strict=True):
        for curve in curves:
            plot_curve(axes, curve.x, curve.y, curve, markers=9)
            if curve.band:
                low, high = zip(*curve.band, strict=True)
                axes.fill_between(curve.x, low, high, color=look(curve.rank).color, alpha=0.2, linewidth=0)
        plain_log_ticks(axes)
        values = [value for curve in curves for value in curve.y]
        axes.set_ylim(min(values) / 1.1, max(values) * 1.1)
        axes.set_title(name)
        _finish(axes, curves, "validation perplexity (logarithmic)")
        end_labels(axes, [(curve, curve.final) for curve in curves])
    _add_key(figure, next(iter(layers.values())))
    return figure


def draw_loss(curves: Sequence[Curve]) -> Figure:
    """Draw loss against iterations; long curves faint under a running mean, labelled with its last value."""
    figure = blank(4.4)
    axes = figure.add_subplot()
    ends = []
    for curve in curves:
        means = running_mean(curve.y, window := mean_window(curve))
        if window > 1:
            axes.plot(curve.x, curve.y, color=look(curve.rank).color, linewidth=0.5, alpha=0.35)
        plot_curve(axes, curve.x, means, curve, markers=9)
        ends.append((curve, means[-1]))
    _finish(axes, curves, "training loss (nats per token)")
    end_labels(axes, ends, gap=0.06)
    _add_key(figure, curves)
    return figure


def mean_window(curve: Curve) -> int:
    """Number of points in the running mean of a curve; 1 if the curve is drawn as it is."""
    return len(curve.x) // 25 if len(curve.x) > SMOOTH_ABOVE else 1


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to `window - 1` values before it."""
    means: list[float] = pd.Series(values).rolling(window, min_periods=1).mean().tolist()
    return means


def _finish(axes: Axes, curves: Sequence[Curve], y_label: str) -> None:
    axes.set_xlim(0, max(curve.x[-1] for curve in curves))
    axes.set_xlabel("iteration")
    axes.set_ylabel(y_label)
    axes.xaxis.set_major_formatter(lambda value, _: compact(value))


def _add_key(figure: Figure, curves: Sequence[Curve]) -> None:
    figure.legend(handles=[key_line(curve) for curve in curves], loc="outside upper left", ncols=5, columnspacing=1.4)
