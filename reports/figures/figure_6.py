"""Figure 6 of the 2019 paper: validation perplexity over training, published and ours on one axis."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axes._secondary_axes import SecondaryAxis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from reports.curves import Curve
from reports.figures.marks import DASHES, blank, end_labels, key_line, plain_log_ticks, plot_curve
from reports.numbers import compact
from reports.style import LIGHT, look

CLOSE_UP_FROM = 0.25
"""Share of training that the close-ups leave out, because the curves fall steeply there."""


def draw(curves: Sequence[Curve], narrow: bool = False) -> Figure:
    """Draw both layers on one logarithmic axis over the share of training, and each layer close up on a linear axis."""
    layout = ConstrainedLayoutEngine(wspace=0.06, hspace=0.08)
    published = [curve for curve in curves if curve.kind == "published"]
    ours = [curve for curve in curves if curve.kind != "published"]
    layers = [(name, layer) for name, layer in (("published", published), (_name(ours), ours)) if layer]
    if narrow:
        figure = blank(narrow, 4.6 + 2.9 * len(layers), layout)
        grid = figure.add_gridspec(1 + len(layers), 1, height_ratios=[1.55, *[1] * len(layers)])
        main, places = grid[0, 0], [grid[1 + row, 0] for row in range(len(layers))]
    else:
        figure = blank(narrow, 5.6, layout)
        grid = figure.add_gridspec(len(layers), 2, width_ratios=[1.5, 1])
        main, places = grid[:, 0], [grid[row, 1] for row in range(len(layers))]
    _overlay(figure.add_subplot(main), published, ours)
    for place, (name, layer) in zip(places, layers, strict=True):
        _close_up(figure.add_subplot(place), name, layer)
    handles = _key(published, ours)
    figure.legend(handles=handles, loc="outside upper left", ncols=3 if narrow else 5, columnspacing=1.4)
    return figure


def _overlay(axes: Axes, published: Sequence[Curve], ours: Sequence[Curve]) -> None:
    for curve in [*published, *ours]:
        _plot(axes, curve, markers=9)
    plain_log_ticks(axes)
    values = [value for curve in [*published, *ours] for value in curve.y]
    axes.set_ylim(min(values) / 1.25, max(values) * 1.25)
    axes.set_xlim(0, 1.0)
    axes.set_ylabel("validation perplexity (logarithmic)")
    _label_iterations(axes, ours or published)
    if published and ours:
        top = axes.secondary_xaxis("top")
        _label_iterations(top, published)
        axes.spines["top"].set_visible(True)
    end_labels(axes, [(curve, curve.final) for curve in [*published, *ours]], gap=0.05)


def _close_up(axes: Axes, name: str, layer: Sequence[Curve]) -> None:
    for curve in layer:
        _plot(axes, curve, markers=8, first=CLOSE_UP_FROM)
    axes.set_title(f"{name}, close up")
    axes.set_xlim(CLOSE_UP_FROM, 1.0)
    axes.margins(y=0.12)
    axes.autoscale(axis="y")
    axes.yaxis.set_major_formatter(lambda value, _: compact(value))
    _label_iterations(axes, layer, CLOSE_UP_FROM)
    axes.set_ylabel("perplexity (linear)")
    end_labels(axes, [(curve, curve.final) for curve in layer], gap=0.11)


def _plot(axes: Axes, curve: Curve, markers: int, first: float = 0.0) -> None:
    """Draw a curve from a share of its training on, over the band of its seeds."""
    start = sum(share < first for share in curve.share)
    plot_curve(axes, curve.share[start:], curve.y[start:], curve, markers)
    if curve.band:
        low, high = zip(*curve.band[start:], strict=True)
        axes.fill_between(curve.share[start:], low, high, color=look(curve.rank).color, alpha=0.2, linewidth=0)


def _key(published: Sequence[Curve], ours: Sequence[Curve]) -> list[Line2D]:
    neutral: dict[str, Any] = {"color": LIGHT["muted"], "marker": "o"}
    handles = [key_line(curve) for curve in ours or published]
    if ours:
        handles.append(Line2D([], [], **neutral, linewidth=2, markersize=5, label=f"solid: {_name(ours)}"))
    if published:
        dashed: dict[str, Any] = {"linewidth": 1.1, "linestyle": DASHES, "markersize": 4.2, "markerfacecolor": "none"}
        handles.append(Line2D([], [], **neutral, **dashed, label="dashed, open: published"))
    return handles


def _name(ours: Sequence[Curve]) -> str:
    kinds = sorted({curve.kind for curve in ours})
    return "scaled twins" if kinds == ["scaled"] else " and ".join(kinds)


def _label_iterations(axes: Axes | SecondaryAxis, layer: Sequence[Curve], first: float = 0.0) -> None:
    """Tick every quarter of training; label ticks with iterations if all curves are equally long, else with shares."""
    name = "published" if layer[0].kind == "published" else _name(layer)
    lengths = {curve.last_x for curve in layer}
    shares = [share for share in (0.0, 0.25, 0.5, 0.75, 1.0) if share >= first]
    if len(lengths) == 1:
        labels = [compact(share * layer[0].last_x) for share in shares]
        axes.set_xlabel(f"iteration, {name}")
    else:
        labels = [f"{share:.0%}" for share in shares]
        axes.set_xlabel(f"share of each run's iterations, {name}")
    axes.set_xticks(shares, labels)
