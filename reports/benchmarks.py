"""Records of benchmarks, of engines held against each other and of learning-rate finders, as exhibits."""

import shlex
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from engine.run.files import LearningRateSweep
from experiments.benchmark import AGAINST, Benchmark, parse_benchmark, sentences, setting_lines, tables
from lineage.errors import BadInput, UserError
from lineage.files import parse_document, read_values
from reports.exhibit import Draw, Exhibit, Section, Table
from reports.figures.marks import DASHES, blank
from reports.files import Problem, Problems, file_name
from reports.numbers import MISSING, exact, printable
from reports.style import LIGHT

COMPARED = ("loss", "gradient norm")
"""Cases of two engines that are drawn."""
DATA_HEADS = ("case", "contender", "measure", "unit", "kind", "round", "value", "goal")


@dataclass(frozen=True)
class Benchmarks:
    """The records of a folder, and a sentence for each file that cannot be used."""

    exhibits: tuple[Exhibit, ...]
    problems: tuple[Problem, ...]
    commits: tuple[str, ...]
    """Commits of the measured code, one for each exhibit."""

    @property
    def section(self) -> Section:
        """The part of the page that shows them."""
        return Section("benchmarks", "Benchmarks", self.exhibits, [problem.sentence for problem in self.problems])


def load_benchmarks(directory: Path) -> Benchmarks:
    """Read every JSON file of a folder and every run of `mlm-verify against` in it.

    Raises BadInput if there is no such folder.
    """
    if not directory.is_dir():
        raise BadInput(f"{directory} is not a directory of benchmark results")
    exhibits: list[Exhibit] = []
    problems, commits = Problems(), []
    for path in sorted([*directory.glob("*.json"), *directory.glob(f"*/{AGAINST}")]):
        try:
            exhibit, commit = _read(path)
            taken = exhibit.name in {other.name for other in exhibits}
            exhibits.append(replace(exhibit, name=f"{exhibit.name}-{len(exhibits) + 1}") if taken else exhibit)
            commits.append(commit)
        except UserError as error:
            problems.add("benchmarks", f"A benchmark cannot be shown: {error}.")
    if not exhibits and not problems:
        problems.add("benchmarks", f"There are no benchmark results in {directory.name}.", damaged=False)
    return Benchmarks(tuple(exhibits), tuple(problems), tuple(commits))


def _read(path: Path) -> tuple[Exhibit, str]:
    """Return the exhibit and the commit of a benchmark's or a learning-rate finder's file."""
    values = read_values(path)
    result: Benchmark | LearningRateSweep
    if isinstance(values, dict) and values.get("benchmark") == "learning-rate":
        result = parse_document(values, LearningRateSweep, path.name)
        exhibit = _rates_exhibit(result)
    else:
        result = parse_benchmark(values, path.name)
        exhibit = _exhibit(result)
    return exhibit, str(result.environment.source.get("commit") or "")


def _rates_exhibit(result: LearningRateSweep) -> Exhibit:
    """Return a learning-rate finder's curve, its suggestion, and a line of data for each iteration."""
    row = (printable(result.name), result.optimizer, str(result.global_batch_size), _rate(result.lowest_rate),
           _rate(result.suggestion))  # fmt: skip
    lines = [tuple(map(exact, line)) for line in zip(result.rates, result.losses, result.smoothed, strict=True)]
    caption = ["The loss never fell below that of the first learning rate: nothing is suggested."]
    if result.suggestion is not None:
        caption = [
            f"With {result.optimizer} the smoothed loss is lowest at {_rate(result.lowest_rate)}; a tenth of "
            f"that, {_rate(result.suggestion)}, is suggested.",
            f"The sweep reached {_rate(result.rates[-1])} in {len(result.rates)} iterations of batch "
            f"{result.global_batch_size}, seed {result.seed}.",
        ]
    return Exhibit(
        "bench-learning-rate",
        "Learning-rate finder",
        [*caption, result.environment.sentence],
        Table(("learning_rate", "loss", "smoothed_loss"), lines, 0),
        shlex.join(result.environment.argv),
        partial(draw_rates, result),
        f"Loss over a rising learning rate, as it was and smoothed. {' '.join(caption)}",
        (Table(("run", "optimizer", "batch", "lowest at", "suggested"), [row], 2),),
        result.notes,
    )


def _rate(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3g}"


def _exhibit(result: Benchmark) -> Exhibit:
    """Return the table of ratios, or of every measure if there are none; two engines' differences with a figure."""
    draw: Draw | None = None
    caption, alt, shown = sentences(result), "", tables(result)
    if result.benchmark == "against":
        caption = [f"{', '.join(setting_lines(result)).capitalize()}.", *caption]
        draw, alt = (
            partial(draw_differences, result),
            "Differences of two engines in each iteration, and the tolerance.",
        )
    if any(case.ratios for case in result.cases):
        shown = [table for table in shown if table.title in ("ratios", "not measured")]
    return Exhibit(
        f"bench-{file_name(result.benchmark)}",
        result.title,
        [printable(sentence) for sentence in (*result.disagreements, *caption)],
        _data(result),
        shlex.join(result.environment.argv),
        draw,
        f"{alt} {' '.join(caption)}" if draw else "",
        tuple(Table(*rows) for rows in shown),
        [*setting_lines(result), *result.notes],
    )


def _data(result: Benchmark) -> Table:
    """Return a line for each sample, and one for each round of each ratio or for its value."""
    rows = [
        (case.name, series.contender, series.measure, series.unit, series.kind, str(number), exact(value), "")
        for case in result.cases for series in case.series
        for number, value in enumerate(series.samples, 1)
    ]  # fmt: skip
    rows += [
        (case.name, "", ratio.name, "ratio", "measured", str(number), exact(value), exact(ratio.goal))
        for case in result.cases for ratio in case.ratios
        for number, value in enumerate(ratio.rounds or [ratio.value], 1)
    ]  # fmt: skip
    return Table(DATA_HEADS, rows, 5)


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
