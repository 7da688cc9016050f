"""How training went, in six panels: loss, validation, learning rate, gradient norm, throughput, arithmetic rate."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from reports.curves import Curve
from reports.figures.marks import blank, key_line, plain_log_ticks
from reports.figures.training_loss import mean_window, running_mean
from reports.numbers import compact
from reports.style import look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(panels: Mapping[str, Sequence[Curve]], narrow: bool = False) -> "Figure":
    """A panel for each title with a curve of each model, three beside each other on a wide page."""
    columns = 1 if narrow else 3
    rows = -(-len(panels) // columns)
    figure = blank(narrow, (2.1 if narrow else 2.75) * rows)
    for place, (title, curves) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, columns, place)
        _panel(axes, title, curves)
        if place > len(panels) - columns:
            axes.set_xlabel("iteration")
    models = {curve.series: curve for curves in panels.values() for curve in curves}
    handles = [key_line(curve) for curve in sorted(models.values(), key=lambda curve: curve.rank)]
    figure.legend(handles=handles, loc="outside upper left", ncols=5, columnspacing=1.4)
    return figure


def _panel(axes: "Axes", title: str, curves: Sequence[Curve]) -> None:
    from matplotlib.ticker import FuncFormatter

    axes.set_title(title)
    for curve in curves:
        color, marker = look(curve.rank)
        window = mean_window(curve)
        if window > 1:
            axes.plot(curve.x, curve.y, color=color, linewidth=0.5, alpha=0.3)
        axes.plot(
            curve.x,
            running_mean(curve.y, window),
            color=color,
            linewidth=max(1.0, 1.9 - 0.3 * curve.rank),
            marker=marker,
            markersize=3.6,
            markevery=max(1, len(curve.x) // 6),
        )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    if "perplexity" in title:
        plain_log_ticks(axes)
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    if title.startswith(("tokens", "share", "TFLOP")):
        axes.set_ylim(bottom=0)
