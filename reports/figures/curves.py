"""Figures of models: validation perplexity and training loss over iterations."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reports.curves import Curve
from reports.figures.marks import DASHES, blank, plain_log_ticks
from reports.numbers import compact, show
from reports.style import LIGHT, look


def draw_perplexity(layers: Mapping[str, Sequence[Curve]]) -> Figure:
    """Draw a panel with axes of its own for each layer: curves with the bands of their seeds, logarithmic."""
    figure = blank(4.4)
    panels = figure.subplots(1, len(layers), squeeze=False)[0]
    for axes, (name, curves) in zip(panels, layers.items(), strict=True):
        _draw(axes, curves, "validation perplexity (logarithmic)")
        plain_log_ticks(axes)
        values = [value for curve in curves for value in curve.y]
        axes.set_ylim(min(values) / 1.1, max(values) * 1.1)
        axes.set_title(name)
    return figure


def draw_loss(curves: Sequence[Curve]) -> Figure:
    """Draw loss against iterations."""
    figure = blank(4.4)
    _draw(figure.add_subplot(), curves, "training loss (nats per token)")
    return figure


def _draw(axes: Axes, curves: Sequence[Curve], y_label: str) -> None:
    """Draw curves in their models' looks: published thin, dashed, open markers; ours solid, filled markers.

    Larger models have thinner lines, so that a curve under another still shows. The key gives each curve's last value.
    """
    for curve in curves:
        color, marker = look(curve.rank)
        published = curve.kind == "published"
        axes.plot(
            curve.x,
            curve.y,
            color=color,
            linewidth=1.1 if published else max(1.2, 2.5 - 0.45 * curve.rank),
            linestyle=DASHES if published else "-",
            marker=marker,
            markersize=(4.2 if published else 5.0) + (1.0 if marker == "^" else 0.0),
            markerfacecolor=LIGHT["paper"] if published else color,
            markeredgecolor=color if published else LIGHT["paper"],
            markeredgewidth=0.9 if published else 0.7,
            markevery=max(1, len(curve.x) // 9),
            clip_on=False,
            zorder=3,
            label=f"{curve.series}, at the end {show(curve.final)}",
        )
        if curve.band:
            low, high = zip(*curve.band, strict=True)
            axes.fill_between(curve.x, low, high, color=color, alpha=0.2, linewidth=0)
    axes.set(xlabel="iteration", ylabel=y_label, xlim=(0, max(curve.x[-1] for curve in curves)))
    axes.xaxis.set_major_formatter(lambda value, _: compact(value))
    axes.legend()
