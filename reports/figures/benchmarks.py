"""Figures of two engines' differences and of a learning-rate finder's sweep."""

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from engine.run.files import LearningRateSweep
from experiments.benchmark import Benchmark
from reports.figures.marks import DASHES, blank
from reports.style import LIGHT

COMPARED = ("loss", "gradient norm")
"""Cases of two engines that are drawn."""


def draw_differences(result: Benchmark, narrow: bool = False) -> Figure:
    """Draw a panel for the losses and one for the gradient norms: a dot an iteration, the tolerance as a band."""
    figure = blank(narrow, 5.4 if narrow else 3.4)
    panels = figure.subplots(2, 1) if narrow else figure.subplots(1, 2)
    for axes, case in zip(panels, (case for case in result.cases if case.name in COMPARED), strict=True):
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
    """Draw the loss against a rising learning rate, with the smoothed loss and the lowest and suggested rates."""
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
