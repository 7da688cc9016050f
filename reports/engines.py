"""Runs of `mlm-verify against` on the page: the losses of two engines on each other, and how far they are apart."""

import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlm_repro.experiments.benchmark import AGAINST, Benchmark, read_benchmark, sentences, setting_lines, tables
from mlm_repro.lineage.derived import Checked, Partly
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.numbers import exact, printable
from mlm_repro.reports.exhibit import Exhibit, Table
from mlm_repro.reports.figures import DASHES, blank
from mlm_repro.reports.style import LIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def read_engines(run: Path) -> Benchmark:
    """Read the record of a run. Raises BadInput if it has no curves of two engines, with differences and tolerances."""
    result = read_benchmark(run / AGAINST)
    for case in result.cases[:1] + [case for case in result.cases if case.series]:
        if len(case.series) != 4 or len({len(series.samples) for series in case.series}) > 1:
            raise BadInput(f"{AGAINST} of {run.name} does not have two engines' {case.name}, difference and tolerance")
    return result


def by_its_curves(run: Checked) -> Iterator[tuple[str, Any, Any]]:
    """The record, by the curves in it and by the manifest."""
    said, config = read_engines(run.path), run.manifest.config
    cases = []
    for case in said.cases:
        cases.append(Partly())
        if case.series:
            mine, theirs, apart, allowed = (np.array(series.samples) for series in case.series)
            share = np.divide(apart, allowed, out=np.where(apart > 0, np.inf, 0.0), where=allowed > 0).max()
            differences = Partly(samples=np.abs(mine - theirs).tolist())
            shares = [Partly(value=max(float(share), case.ratios[0].value)), *(Partly() for _ in case.ratios[1:])]
            cases[-1] |= {"series": [Partly(), Partly(), differences, Partly()], "ratios": shares}
    beyond = [ratio.name for case in said.cases for ratio in case.ratios if not ratio.is_reached]
    named = [*said.disagreements, *beyond][: len(beyond)]
    about = {name: config[name] for name in ("title", "setting", "notes")}
    yield AGAINST, said, Partly(about, cases=cases, disagreements=named)


def engines_exhibit(run: Path) -> Exhibit:
    """Two engines trained alike. Raises BadInput for a damaged record."""
    result = read_engines(run)
    caption = [f"{', '.join(setting_lines(result)).capitalize()}.", *result.disagreements, *sentences(result)]
    curves = {series.contender: series.samples for series in result.cases[0].series}
    data = [
        (case.name, str(number), *map(exact, values))
        for case in result.cases if case.series
        for number, values in enumerate(zip(*(series.samples for series in case.series), strict=True), 1)
    ]  # fmt: skip
    return Exhibit(
        run.name, result.title, [printable(sentence) for sentence in caption],
        Table(("quantity", "iteration", *curves), data), shlex.join(result.environment.argv),
        partial(draw_losses, result),
        f"Loss of two engines in each iteration, and its difference with the tolerance. {' '.join(caption)}",
        [table for table in tables(result) if table.title == "ratios"], result.notes,
    )  # fmt: skip


def draw_losses(result: Benchmark) -> "Figure":
    """Draw both engines' losses on each other, and their differences with the tolerance as a band."""
    (ours, mine), (theirs, others), (_, apart), (_, allowed) = (
        (series.contender, series.samples) for series in result.cases[0].series
    )
    figure, iterations = blank(3.4), range(1, len(mine) + 1)
    losses, differences = figure.subplots(1, 2)
    losses.plot(iterations, mine, color=LIGHT["model-2"], linewidth=2.4, alpha=0.6, label=ours)
    losses.plot(iterations, others, color=LIGHT["ink"], linewidth=0.9, linestyle=DASHES, label=theirs)
    losses.set_ylabel("loss (nats per token)")
    floor = min([value for value in (*apart, *allowed) if value > 0], default=1e-12) / 2
    band, dots = ([max(value, floor) for value in values] for values in (allowed, apart))
    differences.fill_between(iterations, floor, band, color=LIGHT["dropped"], alpha=0.5, lw=0, label="tolerance")
    differences.plot(iterations, dots, ".", color=LIGHT["model-2"], markersize=3, label="difference; none at the foot")
    differences.set_yscale("log")
    differences.set_ylim(bottom=floor)
    differences.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    differences.set_ylabel("difference of the losses")
    for axes in (losses, differences):
        axes.set_xlabel("iteration")
        axes.legend()
    return figure
