"""Other engines on the page: the losses of two engines trained alike, and faults of released
engines on a layout."""

import shlex
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from mlm_repro.experiments.benchmark import AGAINST, Benchmark, read_benchmark, setting_lines
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.numbers import exact, printable
from mlm_repro.reports.exhibit import Exhibit, Table
from mlm_repro.reports.figures import Layer, Panel, Point


def read_engines(run: Path) -> Benchmark:
    """Return the record of a comparison of two engines, a Benchmark, from its run's directory.
    Raises IntegrityFailure if its file cannot be read, and BadInput unless the file is a record
    whose first case, and every other case with series, has four series of one length: ours, theirs,
    their difference and its tolerance."""
    result = read_benchmark(run / AGAINST)
    for case in result.cases[:1] + [case for case in result.cases if case.series]:
        if len(case.series) != 4 or len({len(series.samples) for series in case.series}) > 1:
            raise BadInput(
                f"{AGAINST} of {run.name} does not have two engines' {case.name}, their difference"
                " and its tolerance with one value each for every iteration: compare the engines"
                " again with `mlm-verify against`"
            )
    return result


def apart(results: Sequence[Benchmark]) -> str:
    """Return a sentence on the losses of two engines: the number of iterations, the other engine's
    name and release and, for each of `results`, the largest difference in nats, with the layout.
    There is at least one result, each a comparison on one layout as `read_engines` returns it."""
    theirs = ", ".join(dict.fromkeys(result.title.partition(" beside ")[0] for result in results))
    by_layout = ", ".join(f"{max(_losses(each)[2]):.2g} ({_setting(each)[1]})" for each in results)
    iterations = max(len(_losses(result)[0]) for result in results)
    return (
        f"Losses over {iterations} iterations beside {theirs} are at most {by_layout} nats apart."
    )


def engines_exhibit(*runs: Path) -> Exhibit:
    """Return the Exhibit of two engines trained alike: a figure, a table with a row for each
    layout, the serial one first, and every number as data. Each of `runs`, one or more arguments,
    is the directory of a comparison on one layout; the exhibit of one is named after its directory,
    that of several `engines`. Raises the errors of `read_engines`."""
    results = sorted(map(read_engines, runs), key=lambda result: _setting(result)[1] != "serial")
    data = []
    for result in results:
        for case in result.cases:
            # A column per series; a case without series has no rows.
            iterations = zip(*(series.samples for series in case.series), strict=True)
            data += [
                (result.title, case.name, str(number), *map(exact, values))
                for number, values in enumerate(iterations, 1)
            ]
    rows = []
    for result in results:
        shares = _shares(result)
        rows.append(
            (
                ", ".join(_setting(result)),
                f"{max(_losses(result)[2]):.2g}",
                f"{max(shares, default=0):.2f}",
                f"{sum(share <= 1 for share in shares)} of {len(shares)}",
            )
        )
    beyond = list(chain.from_iterable(result.disagreements for result in results))
    caption = [
        apart(results),
        "; ".join(beyond) or "Every loss, norm, rate and weight is within the tolerance.",
    ]
    notes = [
        *chain.from_iterable(
            [*setting_lines(result), result.environment.sentence] for result in results
        ),
        *results[0].notes,
    ]
    return Exhibit(
        "engines" if len(runs) > 1 else runs[0].name,
        "Two engines trained alike",
        caption,
        Table(
            ("run", "quantity", "iteration", "ours", "theirs", "difference", "tolerance"), data, 2
        ),
        shlex.join(results[0].environment.argv),
        panels_of(results),
        "Loss of two engines in each iteration, and its difference with the tolerance."
        f" {' '.join(caption)}",
        [
            Table(
                (
                    "run",
                    "largest difference of the losses, nats",
                    "largest share of a tolerance",
                    "within",
                ),
                rows,
                1,
            )
        ],
        [printable(line) for line in dict.fromkeys(notes)],
    )


def _setting(result: Benchmark) -> list[str]:
    """Return a list of three texts from the title of `result`, a comparison of engines: the model,
    the layout and the precision. The title names them after its last ": ", with ", " between them.
    A text is empty if the title does not name it."""
    return [*result.title.rpartition(": ")[2].split(", "), "", ""][:3]


def _losses(result: Benchmark) -> list[Sequence[float]]:
    """Return a list of four sequences from the first case of a comparison of engines: our losses,
    theirs, the absolute difference and its tolerance, with a value for each iteration."""
    return [series.samples for series in result.cases[0].series]


def _shares(result: Benchmark) -> list[float]:
    """Return a list of the values of all ratios of a comparison of engines; each value is the
    largest quotient of a difference and the tolerance for this difference."""
    return [ratio.value for ratio in chain.from_iterable(case.ratios for case in result.cases)]


def panels_of(results: Sequence[Benchmark]) -> list[Panel]:
    """Return a list of two Panels over iterations: the losses of both engines, and their
    differences above zero with, in each iteration, the least tolerance of all layouts, on a
    logarithmic axis. Each of `results` is a comparison of engines on one layout."""
    losses = []
    differences = []
    for rank, result in enumerate(results):
        mine, others, gaps, _ = map(_points, _losses(result))
        layout = _setting(result)[1]
        losses += [Layer(layout, rank, "ours", mine), Layer(layout, rank, "theirs", others)]
        differences.append(Layer(layout, rank, "difference", gaps))
    least = list(map(min, zip(*(_losses(result)[3] for result in results), strict=False)))
    differences.append(Layer("least of all layouts", len(results), "tolerance", _points(least)))
    return [
        Panel(losses, "iteration", "loss (nats per token)"),
        Panel(
            differences,
            "iteration",
            "difference of the losses, where there is one",
            is_logarithmic=True,
        ),
    ]


def _points(values: Sequence[float]) -> tuple[Point, ...]:
    # Zero cannot be drawn on the logarithmic axis of the differences.
    return tuple(Point(number, value) for number, value in enumerate(values, 1) if value > 0)
