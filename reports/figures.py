"""Charts of numbers over x: panels of layers, each with the numbers of one series and one kind."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from mlm_repro.lineage.numbers import compact, show
from mlm_repro.lineage.records import Kind, Record
from mlm_repro.reports.style import LIGHT, LINES, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE = (10.6, 4.4)
"""Width and height in inches of a figure as wide as the page."""
COLUMN = (4.5, 3.45)
"""Width and height in inches of a figure that takes half of the page."""
KEY_CHARACTERS = 15
"""Number of letters of the key that fit on an inch."""
MOST_TICKS = 10
"""Largest number of x values that each have a tick, and of points that each have an interval; more
points get a band."""


@dataclass(frozen=True)
class Point:
    """Value drawn at the position `x` of a chart: one number, with the ends `low` and `high` of its
    interval if it has one, or the mean of `count` numbers, with the least and the greatest of
    them."""

    x: float
    value: float
    low: float | None = None
    """Lower end of the number's interval, or the least of several numbers; `high` is the upper end.
    None without an interval."""
    high: float | None = None
    count: int = 1
    """Number of numbers that `value` is the mean of."""

    @classmethod
    def mean(cls, x: float, values: Sequence[float]) -> "Point":
        """Return the Point at `x` of at least one number: their mean, with the least and the
        greatest of them as its interval, `low` and `high`. A single number has no interval."""
        low, high = (min(values), max(values)) if len(values) > 1 else (None, None)
        return cls(x, fmean(values), low, high, len(values))


@dataclass(frozen=True)
class Layer:
    """Line in a figure: `points`, by ascending x, which are of one `series` and one `kind` of
    number. `rank`, the index of the series, decides colour and marker, and `kind` the look of the
    line."""

    series: str
    rank: int
    """Index of the series in a fixed order, from 0. It decides colour and marker."""
    kind: str
    """Kind of the points' numbers, or the name of another line in style.toml, such as `ours`."""
    points: tuple[Point, ...]
    """Points of the line by ascending x."""

    @property
    def final(self) -> float:
        """Value of this layer's last point, at the largest x."""
        return self.points[-1].value

    @property
    def repeats(self) -> int:
        """Largest number of values, such as one from each run, whose mean is a point of this
        layer."""
        return max(point.count for point in self.points)

    @property
    def has_marker(self) -> bool:
        """True if this layer's points are drawn with markers; False for the kind `tolerance`, which
        is drawn as a line alone."""
        return LINES[self.kind]["markersize"] > 0


@dataclass(frozen=True)
class Panel:
    """Chart in a figure: `layers` of points over one pair of axes, with the labels of both axes and
    the chart's title, by default none. Its y axis is logarithmic for a perplexity, for a loss that
    varies much, or if `is_logarithmic` is set."""

    layers: Sequence[Layer]
    x_label: str
    y_label: str
    title: str = ""
    is_logarithmic: bool = False
    """True if the y axis is logarithmic whatever its values are."""

    @property
    def has_curves(self) -> bool:
        """True if this panel's x is the iteration of a training and all its layers are of one kind
        of number. If there are several layers, the panel's own legend then names series and no
        kinds."""
        return self.x_label == "iteration" and len({layer.kind for layer in self.layers}) == 1


def layers_of(numbers: Iterable[Record], order: Sequence[str]) -> list[Layer]:
    """Return a list of chart Layers, one for each kind and series of the records that have an x:
    layers of published numbers first, then the others, both sorted by `order`, which names every
    series.

    Several of our numbers at an x become their mean with minimum and maximum; of several published
    numbers the first counts.
    """
    by_series: dict[tuple[str, Kind], dict[float, list[Record]]] = {}
    for number in numbers:
        if number.x is not None:
            by_series.setdefault((number.series, number.kind), {}).setdefault(number.x, []).append(
                number
            )
    layers = [
        Layer(
            name,
            order.index(name),
            kind,
            tuple(_point(x, kind, at) for x, at in sorted(by_x.items())),
        )
        for (name, kind), by_x in by_series.items()
    ]
    return sorted(layers, key=lambda layer: (layer.kind != "published", layer.rank))


def _point(x: float, kind: Kind, at: Sequence[Record]) -> Point:
    if kind != "published" and len(at) > 1:
        return Point.mean(x, [number.value for number in at])
    return Point(x, at[0].value, at[0].low, at[0].high)


def draw(panels: Sequence[Panel], column: bool = False) -> "Figure":
    """Return a Matplotlib figure of the panels beside each other under one legend of their series
    and kinds; with `column` it takes half of the page's width. Panels of training curves have
    legends of their own. Colours of text and axes are those of `figure_style`, in whose block this
    must be called."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    size = COLUMN if column else WIDE
    figure = Figure(figsize=size, layout="constrained")
    layers = list[Layer]()
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _plot(axes, panel)
        if not panel.has_curves:
            layers += panel.layers
    looks = {layer.series: look(layer.rank) for layer in layers if layer.has_marker}
    handles = [
        Line2D([], [], color=color, marker=marker, markersize=5, linewidth=0, label=series)
        for series, (color, marker) in looks.items()
    ]
    handles.extend(
        Line2D([], [], color=LIGHT["muted"], marker="o", **LINES[kind])
        for kind in dict.fromkeys(layer.kind for layer in layers if layer.has_marker)
    )
    handles.extend(
        Line2D([], [], color=look(layer.rank)[0], **LINES[layer.kind] | {"label": layer.series})
        for layer in layers
        if not layer.has_marker
    )
    if handles:
        widest = max(len(str(handle.get_label())) for handle in handles)
        columns = max(1, min(len(handles), int(KEY_CHARACTERS * size[0]) // (widest + 6)))
        figure.legend(
            handles=handles,
            loc="outside upper left",
            ncols=columns,
            columnspacing=1.2,
            handlelength=2.4,
        )
    return figure


def _plot(axes: "Axes", panel: Panel) -> None:
    """Draw every layer of a panel on `axes`, Matplotlib's, over x, with intervals as whiskers or,
    for more than `MOST_TICKS` points, as a band; the x axis is logarithmic if its values multiply.

    The y axis is logarithmic if the panel asks for it, for perplexities, and for losses that differ
    by more than a factor of four; the y label decides which these are. Other axes begin at zero, or
    below negative values, except a loss's, because zero means nothing for a loss.
    """
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label, title=panel.title)
    for layer in panel.layers:
        color, marker = look(layer.rank)
        line = dict(LINES[layer.kind])
        count = len(layer.points)
        if panel.has_curves:  # larger models are thinner, so that a curve under another still shows
            line["label"] = f"{layer.series}, at the end {show(layer.final)}"
            if layer.kind != "published":
                line |= {
                    "linestyle": "-",
                    "linewidth": max(1.2, 2.5 - 0.45 * layer.rank),
                    "markersize": 5,
                }
        every = 1 if line["linestyle"] == "none" else max(1, count // 9)
        axes.plot(
            [point.x for point in layer.points],
            [point.value for point in layer.points],
            color=color,
            marker=marker,
            markevery=every,
            **line,
        )
        ranges = [
            (point.x, point.value, point.low, point.high)
            for point in layer.points
            if point.low is not None and point.high is not None
        ]
        if ranges:
            at, means, lows, highs = zip(*ranges, strict=True)
            if count > MOST_TICKS:
                axes.fill_between(at, lows, highs, color=color, alpha=0.2, linewidth=0)
            else:
                ends = [
                    [mean - low for mean, low in zip(means, lows, strict=True)],
                    [high - mean for mean, high in zip(means, highs, strict=True)],
                ]
                axes.errorbar(
                    at,
                    means,
                    yerr=ends,
                    fmt="none",
                    color=color,
                    elinewidth=0.8,
                    capsize=2.2,
                    zorder=3,
                )
    if panel.has_curves and len(panel.layers) > 1:
        # Above the curves, where it hides none, unless a title is there.
        axes.legend(**({} if panel.title else {"loc": "lower left", "bbox_to_anchor": (0, 1)}))
    points = list(chain.from_iterable(layer.points for layer in panel.layers))
    xs = sorted({point.x for point in points})
    if _multiply(xs):
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        axes.set_xlim(xs[0] / 1.3, xs[-1] * 1.3)
    if len(xs) <= MOST_TICKS:
        axes.set_xticks(xs, [compact(float(f"{x:.2g}") if x < 1 else x) for x in xs])
    else:
        axes.xaxis.set_major_formatter(lambda value, _: compact(value))
    least = min(point.value if point.low is None else point.low for point in points)
    most = max(point.value if point.high is None else point.high for point in points)
    is_loss = "loss" in panel.y_label
    if panel.is_logarithmic or "perplexity" in panel.y_label or (is_loss and most > 4 * least):
        _plain_log_ticks(axes)
    else:
        axes.set_ylim(0.97 * least if is_loss else min(1.06 * least, 0), 1.06 * most or 1)
        axes.yaxis.set_major_formatter(
            lambda value, _: f"{value:g}" if abs(value) < 1 else compact(value)
        )


def _plain_log_ticks(axes: "Axes") -> None:
    """Set the y axis of the chart `axes` to be logarithmic, with ticks at 1, 2 and 5 times each
    power of ten and no minor ticks. Labels are numbers as the function `compact` writes them, such
    as `2,000` and `200k`."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=20))
    axes.yaxis.set_major_formatter(lambda value, _: compact(float(f"{value:.6g}")))
    axes.yaxis.set_minor_locator(NullLocator())


def _multiply(x_values: Sequence[float]) -> bool:
    """Return True for at least three ascending numbers, all above 0, if each is about twice the one
    before or more, or if one factor leads from each to the next over a range of more than 100."""
    if len(x_values) < 3 or x_values[0] <= 0:
        return False
    factors = [after / before for before, after in pairwise(x_values)]
    return min(factors) >= 1.9 or (
        x_values[-1] > 100 * x_values[0] and max(factors) < 1.01 * min(factors)
    )
