"""Training loss against iterations."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reports.curves import Curve
from reports.figures.marks import blank, end_label, end_labels, key_line, plot_curve
from reports.numbers import compact
from reports.style import look

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMOOTH_ABOVE = 80
"""A curve with more points than this is drawn faint, under its running mean."""


def draw(curves: Sequence[Curve], narrow: bool = False) -> "Figure":
    """Loss curves; long ones faint under a running mean, labelled with its last value."""
    from matplotlib.ticker import FuncFormatter

    figure = blank(narrow, 4.0 if narrow else 4.4)
    axes = figure.add_subplot()
    labels = []
    for curve in curves:
        window = mean_window(curve)
        if window > 1:
            axes.plot(curve.x, curve.y, color=look(curve.rank).color, linewidth=0.6, alpha=0.35)
        means = running_mean(curve.y, window)
        plot_curve(axes, curve.x, means, curve, markers=9)
        labels.append(end_label(curve, means[-1]))
    axes.set_xlim(0, max(curve.last_x for curve in curves))
    axes.set_xlabel("iteration")
    axes.set_ylabel("training loss (nats per token)")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    end_labels(axes, labels, gap=0.075 if narrow else 0.06)
    handles = [key_line(curve) for curve in curves]
    figure.legend(handles=handles, loc="outside upper left", ncols=5, columnspacing=1.4)
    return figure


def mean_window(curve: Curve) -> int:
    """Points in the running mean of a curve; 1 where the curve is drawn as it is."""
    return len(curve.x) // 25 if len(curve.x) > SMOOTH_ABOVE else 1


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to `window - 1` values before it."""
    means = []
    for index in range(len(values)):
        recent = values[max(0, index + 1 - window) : index + 1]
        means.append(sum(recent) / len(recent))
    return means
