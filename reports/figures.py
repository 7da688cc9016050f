"""Charts of numbers over places: the catalogue's, and validation perplexity and training loss of models."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mlm_repro.lineage.numbers import compact, show
from mlm_repro.lineage.records import Kind, Record
from mlm_repro.reports.style import KIND_GLYPHS, LIGHT, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE, COLUMN = 10.6, 4.5
"""Inches of a figure as wide as the page, and of one of which two stand beside each other."""
DASHES = (0, (4, 2.2))
"""Dashes of published and computed lines and of thresholds."""
HEIGHT = 3.45
KEY_CHARACTERS = 66
"""Letters of the key that fit on a line."""


class NumberRow(NamedTuple):
    """A published number or a number made here, with its printed text."""

    quantity: str
    series: str
    kind: Kind
    x: float | None
    value: float
    text: str
    low: float | None = None
    high: float | None = None


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
    """Points by ascending x."""

    @property
    def final(self) -> float:
        """Last value."""
        return self.points[-1].value

    @property
    def repeats(self) -> int:
        """Most numbers at one place."""
        return max(point.count for point in self.points)


def layers_of(numbers: Iterable[Record | NumberRow], order: Sequence[str]) -> list[Layer]:
    """One layer for each kind and series with places on the x axis, published first, then by `order`.

    Several of our numbers at a place become their mean with its spread; of several published numbers the first counts.
    """
    places: dict[tuple[str, Kind], dict[float, list[Record | NumberRow]]] = {}
    for number in numbers:
        if number.x is not None:
            places.setdefault((number.series, number.kind), {}).setdefault(number.x, []).append(number)
    layers = [
        Layer(name, order.index(name), kind, tuple(_point(x, kind, at) for x, at in sorted(by_x.items())))
        for (name, kind), by_x in places.items()
    ]
    return sorted(layers, key=lambda layer: (layer.kind != "published", layer.rank))


def _point(x: float, kind: Kind, at: Sequence[Record | NumberRow]) -> Point:
    values = [number.value for number in at]
    if kind != "published" and len(values) > 1:
        return Point(x, fmean(values), min(values), max(values), len(values))
    return Point(x, values[0], at[0].low, at[0].high)


def blank(height: float, width: float = WIDE) -> "Figure":
    """An empty figure; sizes are in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def plain_log_ticks(axes: "Axes", which: Literal["x", "y"] = "y") -> None:
    """Make an axis logarithmic, with plain numbers at 1, 2 and 5 of each decade."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=20))
    axis.set_major_formatter(lambda value, _: compact(float(f"{value:.6g}")))
    axis.set_minor_locator(NullLocator())


def draw_curves(layers: Sequence[Layer], x_label: str, y_label: str) -> "Figure":
    """Draw every layer over x, logarithmic if the places multiply: published open and dashed, ours filled."""
    from matplotlib.lines import Line2D

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
    handles = []
    for layer in reversed(series):
        color, marker = look(layer.rank)
        handles.append(Line2D([], [], color=color, marker=marker, markersize=5, linewidth=0, label=layer.series))
    for kind in dict.fromkeys(layer.kind for layer in layers):
        label = f"{KIND_GLYPHS[kind]} {'scaled twin' if kind == 'scaled' else kind}"
        label += ", 9 in 10 within" if kind == "simulated" else ""
        handles.append(Line2D([], [], color=LIGHT["muted"], marker="o", label=label, **_line(kind)))
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
    width = 2.2 if kind in ("measured", "counted") else 1.3
    return {"linestyle": style, "linewidth": width, "markersize": 3.4, "zorder": 4}


def _whiskers(axes: "Axes", xs: Sequence[float], points: Sequence[Point], color: str) -> None:
    """Draw intervals of simulated and spreads of measured numbers."""
    ranges = [
        (x, point.value, point.value - point.low, point.high - point.value)
        for x, point in zip(xs, points, strict=True)
        if point.low is not None and point.high is not None
    ]
    if ranges:
        places, values, *ends = zip(*ranges, strict=True)
        axes.errorbar(places, values, yerr=ends, fmt="none", color=color, elinewidth=0.8, capsize=2.2, zorder=3)


def _multiply(places: Sequence[float]) -> bool:
    """True if each place is about twice the one before or more, or if one factor leads from each to the next."""
    if len(places) < 3 or places[0] <= 0:
        return False
    factors = [after / before for before, after in pairwise(places)]
    return min(factors) >= 1.9 or (places[-1] > 100 * places[0] and max(factors) < 1.01 * min(factors))


def draw_panels(panels: Mapping[str, Sequence[Layer]], y_label: str, column: bool = False) -> "Figure":
    """Draw a panel with axes of its own for each group of curves against iterations, with the bands of their seeds.

    The axis of perplexities is logarithmic, and that of others which go over a decade, rates left out. A single curve
    in a column needs no key.
    """
    figure = blank(HEIGHT, COLUMN) if column else blank(4.4)
    for axes, (name, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        _draw(axes, curves, y_label)
        axes.set_title(name)
        values = [point.value for curve in curves for point in curve.points]
        least, most = min(values), max(values)
        if "perplexity" in y_label or (0 < least < most / 10 and "rate" not in y_label):
            plain_log_ticks(axes)
            axes.set_ylim(least / 1.1, most * 1.1)
        else:
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}" if abs(value) < 1 else compact(value))
        if column and len(curves) == 1:
            axes.get_legend().remove()
    return figure


def _draw(axes: "Axes", curves: Sequence[Layer], y_label: str) -> None:
    """Draw curves in their models' looks: published thin, dashed, open markers; ours solid, filled markers.

    Larger models have thinner lines, so that a curve under another still shows. The key gives each curve's last value.
    """
    for curve in curves:
        color, marker = look(curve.rank)
        published, xs = curve.kind == "published", [point.x for point in curve.points]
        axes.plot(
            xs, [point.value for point in curve.points], color=color,
            linewidth=1.1 if published else max(1.2, 2.5 - 0.45 * curve.rank), linestyle=DASHES if published else "-",
            marker=marker, markersize=(4.2 if published else 5.0) + (1.0 if marker == "^" else 0.0),
            markerfacecolor=LIGHT["paper"] if published else color,
            markeredgecolor=color if published else LIGHT["paper"], markeredgewidth=0.9 if published else 0.7,
            markevery=max(1, len(xs) // 9), clip_on=False, zorder=3,
            label=f"{curve.series}, at the end {show(curve.final)}",
        )  # fmt: skip
        if curve.repeats > 1:
            low, high = zip(*((point.low, point.high) for point in curve.points), strict=True)
            axes.fill_between(xs, low, high, color=color, alpha=0.2, linewidth=0)
    axes.set(xlabel="iteration", ylabel=y_label, xlim=(0, max(curve.points[-1].x for curve in curves)))
    axes.xaxis.set_major_formatter(lambda value, _: compact(value))
    axes.legend()
