"""Two runs beside each other: different settings and different results."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lineage.errors import BadInput
from lineage.records import Record
from lineage.run import RunDirectory
from reports.files import Problem
from reports.load import CURVES, Training, load_reproduction, read_training
from reports.numbers import MISSING, show

SPARKS = "▁▂▃▄▅▆▇█"
ENVIRONMENT = ("mlm_repro", "source", "python", "platform", "cpu", "cores", "gpus", "packages", "variables")


@dataclass(frozen=True)
class Side:
    """One of the two runs."""

    name: str
    kind: str
    manifest: Mapping[str, Any]
    values: Mapping[str, float]
    """Results by name."""
    curves: Mapping[str, tuple[float, ...]]
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class RunComparison:
    """Differences between two runs of one kind."""

    first: Side
    second: Side

    @property
    def done(self) -> list[tuple[str, str, str]]:
        """Settings, inputs, code and machine that differ: name, first, second."""
        sides = [dict(_described(side.manifest)) for side in (self.first, self.second)]
        names = sorted(sides[0].keys() | sides[1].keys(), key=lambda name: (_ORDER[name.split(".")[0]], name))
        rows = [(name, sides[0].get(name, MISSING), sides[1].get(name, MISSING)) for name in names]
        return [(name, row, other) for name, row, other in rows if row != other]

    @property
    def results(self) -> list[tuple[str, float | None, float | None]]:
        """Results of either run: name, first, second."""
        names = dict.fromkeys([*self.first.values, *self.second.values])
        return [(name, self.first.values.get(name), self.second.values.get(name)) for name in names]


def compare(first: Path, second: Path) -> RunComparison:
    """Compare two training runs or two reproductions. Raises BadInput for anything else."""
    sides = [_read_side(path) for path in (first, second)]
    if sides[0].kind != sides[1].kind:
        raise BadInput(f"{first} is a {sides[0].kind} run and {second} a {sides[1].kind} run: compare two of one kind")
    return RunComparison(*sides)


def print_comparison(console: Console, comparison: RunComparison) -> None:
    """Print the differences as tables, and each pair of curves on one scale."""
    names = (comparison.first.name, comparison.second.name)
    done = _table("What was done differently", names)
    for name, *values in comparison.done:
        done.add_row(*(Text(cell) for cell in (name, *values)))
    if not comparison.done:
        done.add_row("nothing: settings, inputs, code and machine are equal", "", "")
    console.print(done)
    results = _table("What came of it", names)
    for head in ("second − first", "second ÷ first"):
        results.add_column(head, justify="right")
    for name, result, other in comparison.results:
        change = ["", ""]
        if result is not None and other is not None:
            change = [f"{other - result:+.4g}", f"{other / result:.4f}" if result else MISSING]
        results.add_row(Text(name), show(result), show(other), *change)
    console.print(results)
    curves = _table("Curves, each pair on one scale", names)
    for name in comparison.first.curves:
        if name not in comparison.second.curves:
            continue
        pair = comparison.first.curves[name], comparison.second.curves[name]
        low, high = min(map(min, pair)), max(map(max, pair))
        curves.add_row(Text(name), *(sparkline(values, 30, (low, high)) for values in pair))
    if curves.row_count:
        console.print(curves)


_ORDER = {"config": 0, "input": 1, "code": 2, "machine": 3}


def _described(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    environment = manifest.get("environment", {})
    yield from _flat("config", manifest.get("config", {}))
    yield from ((f"input.{name}", str(digest)[:16]) for name, digest in manifest.get("parents", {}).items())
    for name in ENVIRONMENT:
        part = "code" if name in ("mlm_repro", "source") else "machine"
        yield from _flat(f"{part}.{name}", environment.get(name))


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    elif value is not None:
        yield name, str(value)


def _read_side(directory: Path) -> Side:
    run = RunDirectory.open(directory)
    manifest, name = run.manifest, run.path.name
    if manifest.get("kind") == "training":
        training = read_training(run.path, name)
        curves = {title: ys for field, title in CURVES.items() if (ys := training.points(field)[1])}
        return Side(name, "training", manifest, dict(_training_values(training)), curves, training.problems)
    if manifest.get("kind") == "reproduction":
        reproduction = load_reproduction(run.path)
        own = [record for record in reproduction.records if record.kind != "published"]
        last = {title: values[-1] for title, values in _by_quantity(own).items()}
        curves = _by_quantity([record for record in own if record.x is not None])
        curves = {title: values for title, values in curves.items() if len(values) > 1}
        return Side(name, "reproduction", manifest, last, curves, reproduction.problems)
    raise BadInput(f"{directory} is neither a training run nor a reproduction but {manifest.get('kind')!s}")


def _training_values(training: Training) -> Iterator[tuple[str, float]]:
    if training.steps:
        yield "iterations", training.steps[-1].iteration
        yield "training loss", training.steps[-1].loss
    if training.validations:
        yield "validation perplexity", training.validations[-1].perplexity
    if training.final:
        yield "validation perplexity, whole split", training.final.perplexity
    if summary := training.summary:
        yield "tokens per second", summary.tokens_per_second
        yield "seconds of training", summary.train_seconds
        if summary.memory and summary.memory.measured_bytes:
            yield "largest rank, MB", max(summary.memory.measured_bytes) / 1e6


def _by_quantity(records: list[Record]) -> dict[str, tuple[float, ...]]:
    """Values of each quantity by ascending x."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        title = f"{record.series} {record.quantity.replace('_', ' ')}"
        pairs.setdefault(title, []).append((record.x or 0.0, record.value))
    return {title: tuple(y for _, y in sorted(mine, key=lambda pair: pair[0])) for title, mine in pairs.items()}


def _table(title: str, names: tuple[str, str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("")
    for name in names:
        table.add_column(Text(name), justify="right" if title.startswith("What came") else "left", overflow="fold")
    return table


def sparkline(values: Sequence[float], width: int, scale: tuple[float, float]) -> str:
    """Draw the means of `width` equal stretches as bars between the two ends of `scale`."""
    count = min(width, len(values))
    edges = [len(values) * place // count for place in range(count + 1)]
    means = [fmean(values[start:end]) for start, end in pairwise(edges)]
    low, high = scale
    return "".join(
        SPARKS[round((mean - low) / (high - low) * (len(SPARKS) - 1))] if high > low else "▄" for mean in means
    )
