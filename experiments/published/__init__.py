"""Published workloads, read from the CSV files of this folder, with their published values, read
from `experiments/claims`."""

from collections.abc import Iterator
from decimal import Decimal
from itertools import chain
from pathlib import Path

from mlm_repro.experiments.catalogue import Experiment, Part, find_experiment, read_rows
from mlm_repro.experiments.ranges import Range
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.records import Record

HERE = Path(__file__).parent

Row = dict[str, str]


def workload_rows(name: str) -> list[Row]:
    """Return a list of the rows of the set called `name`, as dicts of texts by column, from the
    `*-runs.csv` files of this folder. Raises BadInput if no row belongs to the set."""
    every = chain.from_iterable(map(read_rows, sorted(HERE.glob("*-runs.csv"))))
    rows = [row for row in every if row["experiment"] == name]
    if not rows:
        raise BadInput(
            f"no row has experiment = {name!r} in the *-runs.csv of experiments/published: name a"
            " set of these in `workloads` and `baseline`, or add its rows"
        )
    return rows


def published_rows(experiment: Experiment, part: Part) -> list[Row]:
    """Return a list of the part's workload rows, each a dict of texts by column, with the values
    that the experiment's claims state at the row's series and x.

    The key of a value is its quantity's name. If several claims state it, the first in the
    catalogue's order counts. A column of the workload's own file wins over a claim of the same
    name. Raises BadInput if no workload row belongs to the part.
    """
    rows = []
    for row in workload_rows(part.workloads):
        x = position(part, row)["x"]
        at = [claim for claim in experiment.claims if (claim.series, claim.x) == (row["series"], x)]
        rows.append({claim.quantity: str(claim.value) for claim in reversed(at)} | row)
    return rows


def published_value(row: Row, quantity: str) -> Range:
    """Return, as a Range, the published value of a quantity in a row of `published_rows`, with the
    range that its printed digits allow. Raises BadInput if no claim states it."""
    if quantity not in row:
        raise BadInput(
            f"no claim states {quantity} for the workload {row['series']} of {row['experiment']},"
            " in the files of experiments/claims: state it there, or name another quantity"
        )
    return Range.printed(Decimal(row[quantity]))


def published_records(series: tuple[str, ...]) -> Iterator[Record]:
    """Yield as Records of kind "published" the claims in the 2019 paper's Figure 6 and Table 3
    about the models that `series` names, such as `8.3b`."""
    for name, x_name in (("2019/figure-6", "iteration"), ("2019/table-3", "")):
        yield from (
            claim.record(name, x_name)
            for claim in find_experiment(name).claims
            if claim.series in series
        )


def position(part: Part, row: Row) -> JSON:
    """Return, as a dict, the fields that place a record of the workload `row` of `part`: `series`,
    the row's; `x`, the number in the row's column of the part's x axis; and `x_name`, that column's
    name. Without an x axis `x` is None and `x_name` is empty."""
    return {"series": row["series"], "x": float(row[part.x]) if part.x else None, "x_name": part.x}
