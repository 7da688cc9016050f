"""The result of a benchmark: cases, who was measured in each of them, samples and ratios.

`mlm-bench` writes it; its terminal, the page and `mlm-bench compare` read it. The tables are made here, so that the
terminal and the page show the same.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, FiniteFloat, NonNegativeFloat, PositiveFloat

from lineage.atomic import read_json, write_json
from lineage.config import Config, parse_config
from lineage.errors import BadInput
from lineage.files import Environment
from lineage.numbers import MISSING, show, size_bytes

if TYPE_CHECKING:
    import pandas as pd

AGAINST = "against.json"
"""The result of `mlm-verify against` in its run."""

Name = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]
NotNegative = Annotated[NonNegativeFloat, Field(allow_inf_nan=False)]
Positive = Annotated[PositiveFloat, Field(allow_inf_nan=False)]


class Series(Config):
    """What one contender reached in one case."""

    contender: Name
    measure: Name
    """What was counted, such as `rate`."""
    unit: str = ""
    samples: Annotated[list[int | FiniteFloat], Field(min_length=1)]
    """One for each round."""
    kind: Literal["measured", "computed"] = "measured"
    """computed: a limit, a bound or a closed form."""


class Ratio(Config):
    """How a figure of one contender compares with that of another, or with a limit."""

    name: Name
    value: NotNegative
    """The median of the rounds, where the notes say nothing else."""
    rounds: list[NotNegative] = Field(default_factory=list)
    goal: Positive | None = None
    less_is_better: bool = False
    """Whether the goal is the most that the ratio may be, and a rise a loss."""

    @property
    def is_reached(self) -> bool:
        """Whether the goal is reached; True without a goal."""
        return self.goal is None or self.share(self.value) >= 1

    def share(self, value: float) -> float:
        """How much of the goal a value reaches: at 1 all of it. Raises ValueError without a goal."""
        if self.goal is None:
            raise ValueError(f"{self.name} has no goal")
        if not self.less_is_better:
            return value / self.goal
        return self.goal / value if value else float("inf")


class Case(Config):
    """One thing that all contenders did: a model trained, a stage run, a point of a curve."""

    name: Name
    axis: str = ""
    """What `at` counts, for a point of a curve."""
    at: Positive | None = None
    series: list[Series] = Field(default_factory=list)
    ratios: list[Ratio] = Field(default_factory=list)
    missing: dict[Name, str] = Field(default_factory=dict)
    """Contenders that were not measured, and why."""
    losses: dict[str, list[FiniteFloat | None]] = Field(default_factory=dict)
    """Of each iteration, by contender; none where it was no number."""
    timeline: dict[str, Any] = Field(default_factory=dict)
    """As in a training run's `timeline.json`."""
    setting: dict[str, Any] = Field(default_factory=dict)
    """What was run: shape, batch, number of requests and the like."""


class Benchmark(Config):
    """A result of `mlm-bench`."""

    benchmark: Name
    """Its name on the command line."""
    title: Name
    cases: Annotated[list[Case], Field(min_length=1)]
    disagreements: list[str] = Field(default_factory=list)
    """A sentence for each contender that computed something else."""
    notes: list[str] = Field(default_factory=list)
    """How it was measured."""
    setting: dict[str, Any] = Field(default_factory=dict)
    """What all cases have in common."""
    load_average: list[FiniteFloat] = Field(default_factory=list)
    """Of the machine, meanwhile."""
    environment: Environment = Environment()


class TextTable(NamedTuple):
    """A table as text; the first `words` columns are words, the others numbers."""

    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    words: int
    title: str


def read_benchmark(path: Path) -> Benchmark:
    """A result that `mlm-bench NAME --json` wrote. Raises BadInput where the file is none."""
    try:
        values = read_json(path)
    except OSError as error:
        raise BadInput(f"{path.name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadInput(f"{path.name} is not JSON: {str(error)[:200]}") from error
    return parse_benchmark(values, path.name)


def parse_benchmark(values: Any, name: str) -> Benchmark:
    """Plain values as a result; `name` says where they stand. Raises BadInput where they are none."""
    if not isinstance(values, dict) or not isinstance(values.get("benchmark"), str):
        raise BadInput(f"{name} is not a result of mlm-bench")
    if "title" not in values:
        raise BadInput(
            f"{name} was written before results had cases: measure again with `mlm-bench {values['benchmark']} --json`"
        )
    return parse_config(values, Benchmark, name)


def write_benchmark(path: Path, result: Benchmark) -> None:
    """Replace `path` with the result; what is empty is left out of its cases."""
    kept = result.model_dump(mode="json", exclude_defaults=True)
    write_json(path, kept | {"environment": result.environment.to_json()})


def samples(result: Benchmark) -> "pd.DataFrame":
    """A row for each sample of each contender in each case."""
    import pandas as pd

    heads = ("case", "axis", "at", "contender", "measure", "unit", "kind", "round", "value")
    rows = [
        (case.name, case.axis, case.at, series.contender, series.measure, series.unit, series.kind, number, value)
        for case in result.cases
        for series in case.series
        for number, value in enumerate(series.samples, 1)
    ]
    return pd.DataFrame(rows, columns=heads)


def ratios(result: Benchmark) -> "pd.DataFrame":
    """A row for each ratio of each case, with the `Ratio` itself."""
    import pandas as pd

    rows = [(case.name, case.axis, ratio.name, ratio.value, ratio) for case in result.cases for ratio in case.ratios]
    return pd.DataFrame(rows, columns=("case", "axis", "name", "value", "ratio"))


def tables(result: Benchmark) -> list[TextTable]:
    """The ratios with their goals, then a table for each measure, then who was not measured; none is empty."""
    tables = [_ratio_rows(result)]
    measures: dict[tuple[str, str], dict[tuple[str, str], list[float]]] = {}
    for case in result.cases:
        for each in case.series:
            found = measures.setdefault((each.measure, each.unit), {})
            found.setdefault((case.name, each.contender), []).extend(each.samples)
    tables += [_sample_rows(found, *measure) for measure, found in measures.items()]
    missing = [(case.name, name, why) for case in result.cases for name, why in case.missing.items()]
    tables.append(TextTable(("case", "contender", "why"), missing, 3, "not measured"))
    return [table for table in tables if table.rows]


def sentences(result: Benchmark) -> list[str]:
    """What the result says at a glance: goals, curves, other work on the machine, the machine."""
    said = []
    aimed = [(case.name, ratio) for case in result.cases for ratio in case.ratios if ratio.goal is not None]
    if aimed:
        missed = [f"{case}, {ratio.name} ({ratio.value:.2f}, goal {ratio.goal:g})"
                  for case, ratio in aimed if not ratio.is_reached]  # fmt: skip
        said.append(f"{len(aimed) - len(missed)} of {len(aimed)} goals were reached.")
        said += [f"Missed: {'; '.join(missed)}."] if missed else []
    curves: dict[str, dict[str, list[float]]] = {}
    for case in result.cases:
        for ratio in case.ratios if case.axis else ():
            curves.setdefault(ratio.name, {}).setdefault(case.axis, []).append(ratio.value)
    for name, axes in curves.items():
        parts = [f"{axis} {min(values):.2f} to {max(values):.2f}" for axis, values in axes.items()]
        said.append(f"{name}: {'; '.join(parts)}.")
    where, load = result.environment, max(result.load_average, default=0.0)
    if load:
        cores = f" on {where.cores} cores" if where.cores else ""
        said.append(f"Load average of the machine meanwhile: up to {load:.1f}{cores}.")
    said.append(where.sentence)
    return said


def setting_lines(result: Benchmark) -> list[str]:
    """What all cases have in common, a line for each key."""
    return [
        f"{key}: {', '.join(f'{name} {part}' for name, part in value.items()) if isinstance(value, dict) else value}"
        for key, value in result.setting.items()
    ]


def _ratio_rows(result: Benchmark) -> TextTable:
    rows = []
    for case in result.cases:
        for ratio in case.ratios:
            spread = f"{min(ratio.rounds):.2f} to {max(ratio.rounds):.2f}" if len(ratio.rounds) > 1 else MISSING
            bound = "at most" if ratio.less_is_better else "at least"
            goal = f"{bound} {ratio.goal:g}{'' if ratio.is_reached else ', missed'}" if ratio.goal else MISSING
            rows.append((case.name, ratio.name, f"{ratio.value:.2f}", spread, goal))
    return TextTable(("case", "ratio", "value", "rounds", "goal"), rows, 2, "ratios")


def _sample_rows(found: Mapping[tuple[str, str], Sequence[float]], measure: str, unit: str) -> TextTable:
    """Medians by case and contender: a row for each case, or for each contender where that is narrower."""
    cases, contenders = (list(dict.fromkeys(key[part] for key in found)) for part in (0, 1))
    medians = {key: float(median(values)) for key, values in found.items()}
    head, down, across = "case", cases, contenders
    if len(contenders) > len(cases):
        head, down, across = "contender", contenders, cases
        medians = {(contender, case): value for (case, contender), value in medians.items()}
    rows = [(row, *(_cell(medians.get((row, column)), unit) for column in across)) for row in down]
    title = measure if unit in ("", "bytes") else f"{measure}, {unit}"
    return TextTable((head, *across), rows, 1, title)


def _cell(value: float | None, unit: str) -> str:
    if value is None:
        return MISSING
    if unit == "bytes":
        return size_bytes(int(value))
    return show(int(value) if not unit and value.is_integer() else value)
