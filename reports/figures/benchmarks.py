"""What benchmarks have: ratios beside their goals, curves along an axis, two engines' differences, a rate's sweep."""

from textwrap import fill

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from engine.run.files import LearningRateSweep
from lineage.benchmark import Benchmark, samples
from reports.figures.marks import DASHES, blank, plain_log_ticks
from reports.numbers import compact
from reports.style import LIGHT, look

NAME_CHARACTERS = 30
"""Of a line of a ratio's name."""
LOGARITHMIC_ABOVE = 4.0
"""Times a panel's largest value is its smallest, or the best ratio its goal."""
COLUMNS = 5
"""Panels beside each other on a wide page."""
COMPARED = ("loss", "gradient norm")
"""Cases of two engines that are drawn."""


def draw_goals(result: Benchmark, narrow: bool = True) -> Figure:
    """A row for each goal: the value's share of it with the rounds' range, at 1 the goal; more is better."""
    goals = [(case.name, ratio) for case in result.cases for ratio in case.ratios if ratio.goal is not None]
    names = [fill(f"{case}: {ratio.name}", NAME_CHARACTERS) for case, ratio in goals]
    figure = blank(narrow, 0.8 + sum(0.14 + 0.16 * (1 + name.count("\n")) for name in names))
    axes = figure.subplots()
    for place, (_, ratio) in enumerate(goals):
        shares = [ratio.share(value) for value in ratio.rounds or [ratio.value]]
        color = LIGHT["good" if ratio.is_reached else "alert"]
        axes.plot([min(shares), max(shares)], [place, place], color=color, linewidth=2.6, alpha=0.5)
        marker = "o" if ratio.is_reached else "s"
        axes.plot(ratio.share(ratio.value), place, marker, color=color, markersize=5, zorder=3)
    axes.axvline(1.0, color=LIGHT["ink"], linewidth=0.9)
    axes.set_yticks(range(len(goals)), names)
    axes.invert_yaxis()
    if max(ratio.share(ratio.value) for _, ratio in goals) > LOGARITHMIC_ABOVE:
        plain_log_ticks(axes, "x")
    else:
        axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("share of the goal (1: reached)")
    return figure


def draw_axes(result: Benchmark, narrow: bool = False) -> Figure:
    """A panel for each axis and measure: medians with the rounds' range; limits and closed forms dashed."""
    frame = samples(result)
    panels = list(frame[frame["axis"] != ""].groupby(["axis", "measure", "unit"], sort=False))
    columns = 1 if narrow else min(len(panels), COLUMNS)
    rows = -(-len(panels) // columns)
    figure = blank(narrow, (2.9 if columns > 2 else 3.4) * rows)
    places = figure.subplots(rows, columns, squeeze=False).flat
    for axes, ((axis, measure, unit), part) in zip(places, panels, strict=False):
        _panel(axes, part)
        axes.set_xlabel(axis)
        axes.set_title(f"{measure}, {unit}" if unit else measure)
    for axes in [*places]:
        axes.set_axis_off()
    return figure


def _panel(axes: Axes, part: pd.DataFrame) -> None:
    for rank, ((contender, kind), curve) in enumerate(part.groupby(["contender", "kind"], sort=False)):
        points = curve.groupby("at")["value"].agg(["median", "min", "max"])
        color, marker = (LIGHT["muted"], "") if kind == "computed" else look(rank)
        style = DASHES if kind == "computed" else "-"
        axes.plot(points.index, points["median"], color=color, marker=marker, markersize=4.5, linewidth=1.3,
                  linestyle=style, label=contender)  # fmt: skip
        axes.vlines(points.index, points["min"], points["max"], color=color, linewidth=2.6, alpha=0.5)
    sizes = sorted(part["at"].unique())
    axes.set_xscale("log")
    axes.set_xticks(sizes, [compact(float(f"{size:.4g}")) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    if part["value"].min() > 0 and part["value"].max() > LOGARITHMIC_ABOVE * part["value"].min():
        plain_log_ticks(axes)
    else:
        axes.set_ylim(0, 1.15 * part["value"].max())
        axes.yaxis.set_major_formatter(lambda value, _: compact(float(f"{value:.6g}")))
    axes.legend(loc="best")


def draw_differences(result: Benchmark, narrow: bool = False) -> Figure:
    """A panel for the losses and one for the gradient norms: a dot for each iteration, the tolerance as a band."""
    figure = blank(narrow, 5.4 if narrow else 3.4)
    panels = figure.subplots(2, 1) if narrow else figure.subplots(1, 2)
    for axes, case in zip(panels, (one for one in result.cases if one.name in COMPARED), strict=True):
        curves = {series.contender: series.samples for series in case.series}
        iterations = range(1, len(curves["difference"]) + 1)
        floor = min([value for name in ("difference", "tolerance") for value in curves[name] if value > 0]) / 2
        apart, allowed = ([max(value, floor) for value in curves[name]] for name in ("difference", "tolerance"))
        axes.fill_between(iterations, floor, allowed, color=LIGHT["dropped"], alpha=0.5, linewidth=0, label="tolerance")
        axes.plot(iterations, apart, ".", color=LIGHT["model-2"], markersize=3, label="difference, or none at the foot")
        axes.set_yscale("log")
        axes.set_ylim(bottom=floor)
        axes.set_xlabel("iteration")
        axes.set_ylabel(f"difference of the {case.name}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return figure


def draw_rates(result: LearningRateSweep, narrow: bool = False) -> Figure:
    """Loss against a rising learning rate: each faint, smoothed strong, the lowest and the suggested rate marked."""
    figure = blank(narrow, 3.3)
    axes = figure.subplots()
    axes.plot(result.rates, result.losses, color=LIGHT["dropped"], linewidth=0.9, label="each iteration")
    axes.plot(result.rates, result.smoothed, color=LIGHT["model-2"], linewidth=1.8, label="smoothed")
    if result.lowest_rate and result.suggestion:
        axes.axvline(result.lowest_rate, color=LIGHT["muted"], linewidth=1, linestyle=(0, (1, 1.2)), label="lowest")
        axes.axvline(result.suggestion, color=LIGHT["good"], linewidth=1.4, linestyle=DASHES, label="suggested")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda rate, _: f"{rate:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    lowest, first = min(result.smoothed), result.losses[0]
    axes.set_ylim(lowest - 0.1 * (first - lowest) - 0.01, 1.15 * first)
    axes.set_xlabel("learning rate (logarithmic)")
    axes.set_ylabel("training loss")
    axes.legend(loc="best")
    return figure
