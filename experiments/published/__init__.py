"""Published workloads, from the files beside this one, with their published values, from
`experiments/claims`."""

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from mlm_repro.experiments.catalogue import Experiment, Part, find_experiment, read_rows
from mlm_repro.experiments.ranges import Range
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.records import Record

HERE = Path(__file__).parent

Row = dict[str, str]


def workload_rows(name: str) -> list[Row]:
    """The rows of a set in the `*-runs.csv` files of this folder. Raises BadInput where there is
    none."""
    rows = [
        row
        for path in sorted(HERE.glob("*-runs.csv"))
        for row in read_rows(path)
        if row["experiment"] == name
    ]
    if not rows:
        raise BadInput(f"there are no workloads {name!r} in *-runs.csv")
    return rows


def published_rows(experiment: Experiment, part: Part) -> list[Row]:
    """The part's workloads, each with the values that the experiment's claims have at its series
    and x.

    A value stands under its quantity's name; of several sources the catalogue's first is taken.
    """
    values: dict[tuple[str, float | None], Row] = {}
    for claim in experiment.claims:
        values.setdefault((claim.series, claim.x), {}).setdefault(claim.quantity, str(claim.value))
    rows = workload_rows(part.workloads)
    return [values.get((row["series"], position(part, row)["x"]), {}) | row for row in rows]


def published_value(row: Row, quantity: str) -> Range:
    """The published value of a quantity for a row of `published_rows`, between the ends of its
    printed digits. Raises BadInput if no claim states it."""
    if quantity not in row:
        raise BadInput(
            f"no claim has {quantity} for the workload {row['series']} of {row['experiment']}"
        )
    return Range.printed(Decimal(row[quantity]))


def published_records(series: tuple[str, ...]) -> Iterator[Record]:
    """The claims of the 2019 paper's Figure 6 and Table 3 about the named models."""
    for name, x_name in (("2019/figure-6", "iteration"), ("2019/table-3", "")):
        yield from (
            each.record(name, x_name)
            for each in find_experiment(name).claims
            if each.series in series
        )


def position(part: Part, row: Row) -> dict[str, Any]:
    """Series and x of a workload's record."""
    return {"series": row["series"], "x": float(row[part.x]) if part.x else None, "x_name": part.x}
