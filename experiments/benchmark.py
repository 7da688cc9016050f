"""The record of a benchmark: cases, samples of each contender, ratios with their goals. Imports no torch.

The benchmarks and `mlm-verify against` write it. The terminal and the page show the same tables, which are made here.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, NonNegativeFloat

from mlm_repro.lineage.atomic import write_json
from mlm_repro.lineage.config import Config, parse_config
from mlm_repro.lineage.files import Environment, Positive, read_values
from mlm_repro.lineage.numbers import MISSING, aligned, csv_cell, show, size_bytes

AGAINST = "against.json"
"""The record that `mlm-verify against` keeps in its run."""

Name = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]
NotNegative = Annotated[NonNegativeFloat, Field(allow_inf_nan=False)]


class Series(Config):
    """The samples of one contender in one case."""

    contender: Name
    measure: Name
    """The quantity, such as `rate`."""
    unit: str = ""
    samples: Annotated[list[int | FiniteFloat], Field(min_length=1)]
    """One sample for each round."""
    kind: Literal["measured", "computed"] = "measured"
    """computed: a limit, a bound or a closed form."""


class Ratio(Config):
    """A quantity of one contender over that of another, or over a limit."""

    name: Name
    value: NotNegative
    """The median of the rounds, unless the notes say otherwise."""
    rounds: list[NotNegative] = Field(default_factory=list)
    goal: Positive | None = None
    less_is_better: bool = False
    """True if the goal is an upper bound."""

    @property
    def is_reached(self) -> bool:
        """True if the goal is reached, and without a goal."""
        if self.goal is None:
            return True
        return self.value <= self.goal if self.less_is_better else self.value >= self.goal


class Case(Config):
    """One task that all contenders did: a model trained, a stage run."""

    name: Name
    series: list[Series] = Field(default_factory=list)
    ratios: list[Ratio] = Field(default_factory=list)
    missing: dict[Name, str] = Field(default_factory=dict)
    """Contenders that were not measured, with the reason."""
    losses: dict[str, list[FiniteFloat | None]] = Field(default_factory=dict)
    """Losses of each iteration, by contender; None for a loss that is not a number."""
    setting: dict[str, Any] = Field(default_factory=dict)
    """The task's shape, batch, number of requests and the like."""


class Benchmark(Config):
    """All cases of one run, with the machine that they were measured on."""

    benchmark: Name
    """The benchmark's name on the command line."""
    title: Name
    cases: Annotated[list[Case], Field(min_length=1)]
    disagreements: list[str] = Field(default_factory=list)
    """A sentence for each contender that computed something else."""
    notes: list[str] = Field(default_factory=list)
    """Sentences on the method."""
    setting: dict[str, Any] = Field(default_factory=dict)
    """Settings that all cases share."""
    load_average: list[FiniteFloat] = Field(default_factory=list)
    """The machine's load average during the run."""
    environment: Environment = Environment()


@dataclass(frozen=True)
class Table:
    """Cells as text under their heads. The first `words` columns hold words, the others numbers."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    title: str = ""

    @property
    def csv(self) -> str:
        """Comma-separated values with a line of heads."""
        buffer = io.StringIO()
        rows = ([csv_cell(cell) for cell in row] for row in (self.heads, *self.rows))
        csv.writer(buffer, lineterminator="\n").writerows(rows)
        return buffer.getvalue()


def read_benchmark(path: Path) -> Benchmark:
    """Read a record. Raises IntegrityFailure if the file has no JSON, BadInput if that is no record."""
    return parse_config(read_values(path), Benchmark, path.name)


def write_benchmark(path: Path, result: Benchmark) -> None:
    """Replace `path` with the record; empty fields are left out of its cases."""
    values = result.model_dump(mode="json", exclude_defaults=True)
    write_json(path, values | {"environment": result.environment.to_json()})


def tables(result: Benchmark) -> list[Table]:
    """Make the tables: ratios with their goals, one for each measure, contenders that were not measured."""
    rows = []
    for case in result.cases:
        for ratio in case.ratios:
            spread = f"{min(ratio.rounds):.2f} to {max(ratio.rounds):.2f}" if len(ratio.rounds) > 1 else MISSING
            bound = "at most" if ratio.less_is_better else "at least"
            goal = f"{bound} {ratio.goal:g}{'' if ratio.is_reached else ', missed'}" if ratio.goal else MISSING
            rows.append((case.name, ratio.name, f"{ratio.value:.2f}", spread, goal))
    every = [Table(("case", "ratio", "value", "rounds", "goal"), rows, 2, "ratios")]
    measures: dict[tuple[str, str], dict[tuple[str, str], float]] = {}
    for case in result.cases:
        for each in case.series:
            medians = measures.setdefault((each.measure, each.unit), {})
            medians[case.name, each.contender] = float(median(each.samples))
    every += [_measure_table(medians, *measure) for measure, medians in measures.items()]
    missing = [(case.name, name, why) for case in result.cases for name, why in case.missing.items()]
    every.append(Table(("case", "contender", "why"), missing, 3, "not measured"))
    return [table for table in every if table.rows]


def sentences(result: Benchmark) -> list[str]:
    """Sum up the record: goals reached and missed, other work on the machine, the machine."""
    lines = []
    aimed = [(case.name, ratio) for case in result.cases for ratio in case.ratios if ratio.goal is not None]
    if aimed:
        missed = [f"{case}, {ratio.name} ({ratio.value:.2f}, goal {ratio.goal:g})"
                  for case, ratio in aimed if not ratio.is_reached]  # fmt: skip
        lines.append(f"{len(aimed) - len(missed)} of {len(aimed)} goals were reached.")
        lines += [f"Missed: {'; '.join(missed)}."] if missed else []
    where, load = result.environment, max(result.load_average, default=0.0)
    if load:
        cores = f" on {where.cores} cores" if where.cores else ""
        lines.append(f"Load average of the machine meanwhile: up to {load:.1f}{cores}.")
    return [*lines, where.sentence]


def setting_lines(result: Benchmark) -> list[str]:
    """Format the settings that all cases share, a line for each key."""
    return [
        f"{key}: {', '.join(f'{name} {part}' for name, part in value.items()) if isinstance(value, dict) else value}"
        for key, value in result.setting.items()
    ]


def show_benchmark(result: Benchmark) -> None:
    """Print the shared settings, the tables, their summary and the method."""
    print(result.title, *setting_lines(result), sep="\n")
    for table in tables(result):
        print(f"\n{table.title}", *aligned([table.heads, *table.rows]), sep="\n")
    print(*(f"- {line}" for line in (*sentences(result), *result.disagreements, *result.notes)), sep="\n")


def _measure_table(medians: dict[tuple[str, str], float], measure: str, unit: str) -> Table:
    """Medians by case and contender: a row for each case, or for each contender if that is narrower."""
    cases, contenders = (list(dict.fromkeys(key[part] for key in medians)) for part in (0, 1))
    head, down, across = "case", cases, contenders
    if len(contenders) > len(cases):
        head, down, across = "contender", contenders, cases
        medians = {(contender, case): value for (case, contender), value in medians.items()}
    rows = [(row, *(_cell(medians.get((row, column)), unit) for column in across)) for row in down]
    title = measure if unit in ("", "bytes") else f"{measure}, {unit}"
    return Table((head, *across), rows, 1, title)


def _cell(value: float | None, unit: str) -> str:
    if value is None:
        return MISSING
    if unit == "bytes":
        return size_bytes(int(value))
    return show(int(value) if not unit and value.is_integer() else value)
