"""Charts of the catalogue."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lineage.records import Kind
from reports.figures.marks import COLUMN, DASHES, blank, plain_log_ticks
from reports.numbers import compact
from reports.style import KIND_GLYPHS, LIGHT, look

HEIGHT = 3.45
KEY_CHARACTERS = 66
"""Letters of the key that fit on a line."""


@dataclass(frozen=True)
class Point:
    """A number at a place, or the mean of several."""

    x: float
    value: float
    low: float | None = None
    high: float | None = None
    count: int = 1


@dataclass(frozen=True)
class Layer:
    """One series of one kind."""

    series: str
    rank: int
    """Place among the series. It decides colour and marker."""
    kind: Kind
    points: tuple[Point, ...]


def draw_curves(layers: Sequence[Layer], x_label: str, y_label: str) -> Figure:
    """Draw every layer over x, logarithmic if the places multiply: published open and dashed, ours filled."""
    figure = blank(HEIGHT, COLUMN)
    axes = figure.add_subplot()
    axes.set(xlabel=x_label, ylabel=y_label)
    places = sorted({point.x for layer in layers for point in layer.points})
    if _multiply(places):
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        axes.set_xlim(places[0] / 1.3, places[-1] * 1.3)
    shown = places if len(places) <= 10 else places[:: -(-len(places) // 8)]
    axes.set_xticks(shown, [compact(float(f"{place:.2g}") if place < 1 else place) for place in shown])
    for layer in layers:
        color, marker = look(layer.rank)
        xs, ys = [point.x for point in layer.points], [point.value for point in layer.points]
        _whiskers(axes, xs, layer.points, color)
        axes.plot(xs, ys, color=color, marker=marker, **_line(layer.kind))
    top = max(max(point.value, point.high or point.value) for layer in layers for point in layer.points)
    axes.set_ylim(0, top * 1.06 if top else 1)
    if "loss" in y_label:  # which has no meaningful zero
        values = [point.value for layer in layers for point in layer.points]
        axes.set_ylim(bottom=0.97 * min(point.low or point.value for layer in layers for point in layer.points))
        if max(values) > 4 * min(values):
            plain_log_ticks(axes)
    series = {layer.series: layer for layer in reversed(layers)}.values()
    handles = [_series_key(layer) for layer in reversed(series)]
    handles += [_kind_key(kind) for kind in dict.fromkeys(layer.kind for layer in layers)]
    widest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, min(len(handles), KEY_CHARACTERS // (widest + 6)))
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, columnspacing=1.2, handlelength=2.4)
    return figure


def _line(kind: Kind) -> dict[str, Any]:
    """Line and marker of a kind, which differ from those of other kinds without colour."""
    if kind == "published":
        return {"linestyle": DASHES, "linewidth": 1.0, "markersize": 6.2, "markerfacecolor": LIGHT["paper"],
                "markeredgewidth": 1.0, "zorder": 3}  # fmt: skip
    style = {"simulated": "-", "computed": "none", "scaled": (0, (1, 1.2)), "measured": "-", "counted": "-"}[kind]
    return {
        "linestyle": style,
        "linewidth": 2.2 if kind in ("measured", "counted") else 1.3,
        "markersize": 3.4,
        "zorder": 4,
    }


def _whiskers(axes: Axes, xs: Sequence[float], points: Sequence[Point], color: str) -> None:
    """Draw intervals of simulated and spreads of measured numbers."""
    for x, point in zip(xs, points, strict=True):
        if point.low is not None and point.high is not None:
            ends = [[point.value - point.low], [point.high - point.value]]
            axes.errorbar([x], [point.value], yerr=ends, fmt="none", color=color, elinewidth=0.8, capsize=2.2, zorder=3)


def _multiply(places: Sequence[float]) -> bool:
    """True if each place is about twice the one before or more, or if one factor leads from each to the next."""
    if len(places) < 3 or places[0] <= 0:
        return False
    factors = [after / before for before, after in pairwise(places)]
    return min(factors) >= 1.9 or (places[-1] > 100 * places[0] and max(factors) < 1.01 * min(factors))


def _series_key(layer: Layer) -> Line2D:
    color, marker = look(layer.rank)
    return Line2D([], [], color=color, marker=marker, markersize=5, linewidth=0, label=layer.series)


def _kind_key(kind: Kind) -> Line2D:
    label = f"{KIND_GLYPHS[kind]} {'scaled twin' if kind == 'scaled' else kind}"
    label += ", 9 in 10 within" if kind == "simulated" else ""
    return Line2D([], [], color=LIGHT["muted"], marker="o", label=label, **_line(kind))
