"""The record of a benchmark: cases, samples of each contender, ratios with their goals. Imports no
torch.

The benchmarks and `mlm-verify against` write it.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, NonNegativeFloat

from mlm_repro.lineage.atomic import JSON, write_json
from mlm_repro.lineage.config import Config, parse_config
from mlm_repro.lineage.files import Environment, Positive, read_values
from mlm_repro.lineage.numbers import csv_cell

AGAINST = "against.json"
"""Name of the file with the record that `mlm-verify against` keeps in its run."""
COMPARED = "loss", "gradient norm", "learning rate", "weights at the end"
"""Names of that record's cases, in their order: three curves, and the final weights."""
MOST = 1e9
"""Largest share of a tolerance that `share_of` states; also the share of any difference where none
is allowed."""

Name = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]
NotNegative = Annotated[NonNegativeFloat, Field(allow_inf_nan=False)]


class Series(Config):
    """The samples of one measured or computed quantity of a contender in a case."""

    contender: Name
    measure: Name
    """Name of the quantity, such as `rate`."""
    unit: str = ""
    samples: Annotated[list[int | FiniteFloat], Field(min_length=1)]
    """One sample for each round; in a comparison of engines one for each iteration."""
    kind: Literal["measured", "computed"] = "measured"
    """Kind of the samples; computed: a limit, a bound or a closed form."""


class Ratio(Config):
    """A contender's quantity divided by another contender's, or by a limit: `value`, mostly the
    median of the rounds; `rounds`, the ratio of each round; and `goal`, if there is one, a lower
    bound, or an upper one with `less_is_better`."""

    name: Name
    value: NotNegative
    """The median of the rounds, unless the notes say otherwise; of a tolerance the largest share
    that a difference takes."""
    rounds: list[NotNegative] = Field(default_factory=list)
    goal: Positive | None = None
    less_is_better: bool = False
    """True if the goal is an upper bound."""

    @property
    def is_reached(self) -> bool:
        """True if the value reaches the goal, from above if `less_is_better` and else from below;
        equality suffices. Also True if there is no goal."""
        if self.goal is None:
            return True
        return self.value <= self.goal if self.less_is_better else self.value >= self.goal


class Case(Config):
    """Results of one task, such as the training of a model: series and ratios of the contenders,
    why others are missing, the losses of the first round, and the task's setting."""

    name: Name
    series: list[Series] = Field(default_factory=list)
    ratios: list[Ratio] = Field(default_factory=list)
    missing: dict[Name, str] = Field(default_factory=dict)
    """Reason for each contender that was not measured, by its name."""
    losses: dict[str, list[FiniteFloat | None]] = Field(default_factory=dict)
    """Losses of each iteration of the first round, by contender; None for one that is NaN or
    infinite."""
    setting: JSON = Field(default_factory=dict)
    """The task's shape, batch, number of requests and the like."""


class Benchmark(Config):
    """Content of a benchmark's JSON file: all cases of one run with their shared settings, the
    disagreements, notes on the method, and the machine that they were measured on."""

    benchmark: Name
    """Name of the benchmark, such as `train`."""
    title: Name
    cases: Annotated[list[Case], Field(min_length=1)]
    disagreements: list[str] = Field(default_factory=list)
    """A sentence for each contender or case whose answers differ by more than is allowed."""
    notes: list[str] = Field(default_factory=list)
    """Sentences on the method of the measurements."""
    setting: JSON = Field(default_factory=dict)
    """Settings that all cases of the benchmark share."""
    load_average: list[FiniteFloat] = Field(default_factory=list)
    """The machine's load averages over one minute before the run and after it; empty if they were
    not noted."""
    environment: Environment = Environment()


@dataclass(frozen=True)
class Table:
    """A table with a title: rows of text cells under column headings, `heads`. The first `words`
    columns hold words, the others numbers."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    title: str = ""

    @property
    def csv(self) -> str:
        """The table as CSV text: a line of heads, then the rows. A cell that a spreadsheet would
        take for a formula gets an apostrophe before it."""
        buffer = io.StringIO()
        rows = ([csv_cell(cell) for cell in row] for row in (self.heads, *self.rows))
        csv.writer(buffer, lineterminator="\n").writerows(rows)
        return buffer.getvalue()


def share_of(name: str, distances: Sequence[float], allowed: Sequence[float]) -> Ratio:
    """Return a Ratio called `name` with the goal 1 as an upper bound: the largest quotient of one
    of the `distances` and the distance that is `allowed` at the same index. A quotient is at most
    `MOST` (1e9), which also stands for a NaN, and for any distance but 0 where none is allowed."""
    shares = [
        # min returns its first argument beside a NaN.
        min(MOST, distance / most) if most else MOST * bool(distance)
        for distance, most in zip(distances, allowed, strict=True)
    ]
    return Ratio(name=name, value=max(shares), goal=1.0, less_is_better=True)


def read_benchmark(path: Path) -> Benchmark:
    """Return the Benchmark, the record of a benchmark's run, in the JSON file at `path`. Raises
    IntegrityFailure if the file is missing, cannot be read or is not JSON, BadInput if the JSON is
    not such a record."""
    return parse_config(read_values(path), Benchmark, path.name)


def write_benchmark(path: Path, result: Benchmark) -> None:
    """Write `result`, a benchmark's record, to the file `path` as JSON, replacing a file there.
    Fields that have their default are omitted, except the environment."""
    values = result.model_dump(mode="json", exclude_defaults=True)
    write_json(path, values | {"environment": result.environment.to_json()})


def setting_lines(result: Benchmark) -> list[str]:
    """Return a list with a line `key: value` for each item of `result.setting`, the settings that
    all cases of a Benchmark share, in its order; a value that is a dict is written as names and
    values."""
    return [
        f"{key}: {named(value) if isinstance(value, dict) else value}"
        for key, value in result.setting.items()
    ]


def named(values: JSON) -> str:
    """Return the names and values of a dict, such as a setting, as one text: `name value, name
    value`."""
    return ", ".join(f"{name} {value}" for name, value in values.items())
