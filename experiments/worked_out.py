"""Computes the numbers that need no run: closed forms, arithmetic on printed numbers, and
predictions by the cost model.

Verdicts compute them each time, so they do not depend on earlier runs. Imports no torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from mlm_repro.experiments.catalogue import Experiment, Part, find_experiment
from mlm_repro.experiments.files import FITTED, HELD_OUT
from mlm_repro.experiments.published import Row, position, published_rows, workload_rows
from mlm_repro.experiments.quantities import FORMULAS, LAYER, layer_values, simulated_values
from mlm_repro.experiments.ranges import Range, as_range
from mlm_repro.experiments.sealed import Line
from mlm_repro.experiments.simulator.cluster import Cluster, load_cluster, machine_of
from mlm_repro.experiments.simulator.measurements import (
    QUANTITIES,
    RATIOS,
    Simulated,
    fitted_rows,
    fitted_workloads,
    workload_of,
)
from mlm_repro.experiments.simulator.simulate import Prediction
from mlm_repro.experiments.simulator.simulate import simulate as predict
from mlm_repro.experiments.simulator.workload import Workload, flops_of
from mlm_repro.lineage.digest import sha256_json
from mlm_repro.lineage.records import Record

CONSTANT, BUBBLE = "constant throughput", "bubble alone"
"""Names of the rules that predictions are compared with: every GPU reaches one rate, by the papers'
count of operations; or it does, and the bubble of the pipeline is lost besides."""
TAILS = (0.05, 0.95)


class Worked(NamedTuple):
    """A number that was computed or simulated from published numbers. `record` is its Record.
    `range` is the Range in which the rounding of the printed digits leaves a computed number; a
    simulated number's has no width. `baselines` has the Range that each simpler rule predicts, by
    the rule's name; it is empty if no rule predicts the number, as for every computed one."""

    record: Record
    """The digest of a simulated number is of what it was worked out of: numbers of one workload are
    one prediction. A computed number has none."""
    range: Range
    """The ends between which the rounding of the printed digits leaves a computed number; a
    simulated number has no width here."""
    baselines: Mapping[str, Range]
    """Predictions by simpler rules, by the rule's name; empty for a computed number."""


class WorkedOut(NamedTuple):
    """The numbers that were computed and simulated for one experiment, as Worked, and the workloads
    that cannot run."""

    numbers: tuple[Worked, ...]
    refused: tuple[Line, ...]
    """A dict for each workload that cannot run: its `experiment`, `series` and `x`, and the
    `reason`."""


def work_out(experiment: Experiment) -> WorkedOut:
    """Compute and simulate every quantity that the experiment names, for each of its workloads, and
    its arithmetic on printed numbers; return a WorkedOut, the numbers and the workloads that cannot
    run."""
    numbers = []
    refused = []
    about: Line = {"experiment": experiment.name, "source": ""}

    def compute(place: Line, quantity: str, ours: Range) -> None:
        values = {"quantity": quantity, "kind": "computed", "value": ours.value}
        numbers.append(Worked(Record(**about | place | values), ours, {}))

    for part in experiment.parts:
        rows = published_rows(experiment, part)
        first = {row["series"]: row for row in reversed(rows)}
        for row in rows:
            for name in part.computed:
                ours = as_range(FORMULAS[name](row, first[row["series"]]))
                compute(position(part, row), name, ours)
        for line, of, baselines in _simulated(part, rows):
            if "reason" in line:
                refused.append({"experiment": experiment.name} | line)
            else:
                record = Record(**about | line, digest=sha256_json(of))
                numbers.append(Worked(record, as_range(record.value), baselines))
    by_id = {claim.id: claim for claim in experiment.claims}
    for each in experiment.arithmetic:
        claim = by_id[each.claim]
        place = {"series": claim.series, "x": claim.x}
        compute(place, claim.quantity, each.worked_out(claim.says))
    return WorkedOut(tuple(numbers), tuple(refused))


def worked_out(experiment: Experiment) -> WorkedOut:
    """Return the WorkedOut that `work_out` computes for the catalogue's experiment of this
    experiment's name; it is computed once in a process."""
    return _worked_out(experiment.name)


@cache
def _worked_out(name: str) -> WorkedOut:
    return work_out(find_experiment(name))


def _simulated(part: Part, rows: Sequence[Row]) -> Iterator[tuple[Line, Any, Mapping[str, Range]]]:
    """Yield a triple for each simulated quantity of each workload of `rows`: a line (a dict with a
    record's fields), the values that its digest is made of, and a dict of the baselines'
    predictions by name.

    If the workload, or the one that ratios refer to, cannot run, the workload gets one triple,
    whose line has the `reason`; a part of the experiment that simulates quantities of one layer
    alone (`LAYER`) is simulated nevertheless. A part that simulates nothing yields nothing.
    """
    if not part.simulated:
        return
    base = workload_rows(part.baseline)[0] if part.baseline else rows[0]
    predictions = [_predict(row) for row in (base, *rows)]
    first, first_prediction = predictions[0]
    for row, (workload, prediction) in zip(rows, predictions[1:], strict=True):
        reason = prediction.reason or first_prediction.reason
        place = position(part, row)
        if reason and not {*part.simulated} <= {*LAYER}:  # a layer needs no room for the model
            yield {"series": place["series"], "x": place["x"], "reason": reason}, 0, {}
            continue
        cluster = _cluster(row["cluster"])
        note = FITTED if workload in fitted_workloads(cluster.software) else HELD_OUT
        for name in part.simulated:
            of: Any = (row["cluster"], workload, first if name in RATIOS else None)
            baselines: Mapping[str, Range] = {}
            if name in LAYER:
                of = (*of, name)
                values = layer_values(
                    name, machine_of(cluster), workload, first, cluster.intervals.one_node
                )
            else:
                seconds = first_prediction.seconds
                both = Simulated(workload, prediction.seconds, first, seconds, row["cluster"])
                values = simulated_values(name, both, prediction, cluster.intervals.ratio)
                baselines = _baselines(cluster, both, name)
            yield place | values | {"note": note}, of, baselines


@cache
def _cluster(name: str) -> Cluster:
    return load_cluster(name)


def _predict(row: Row) -> tuple[Workload, Prediction]:
    workload = workload_of(row)._replace(scatter_gather=row.get("scatter_gather") != "false")
    return workload, predict(_cluster(row["cluster"]), [workload])[0]


def _slowest(name: str, workload: Workload) -> float:
    """Return the seconds of the workload's iteration at 1 TFLOP/s per GPU. `name` is a rule's: by
    `BUBBLE` its operations and the idle time of its pipeline count, by any other its operations
    alone."""
    lost = (workload.pp - 1) / (workload.chunks * workload.microbatches) if name == BUBBLE else 0.0
    return flops_of(workload) / (workload.gpus * 1e12) * (1 + lost)


@cache
def rates_of(software: str, name: str) -> tuple[float, float, float]:
    """Return three numbers, the median, the 5th and the 95th percentile of the rates, in TFLOP/s
    per GPU, at which the rule `name` (`CONSTANT` or `BUBBLE`) gives the published numbers on which
    the constants of `software` are fitted.

    Ratios are left out, because they state no rate. There must be a number that is no ratio.
    """
    rates = []
    for row in fitted_rows(software):
        if row.is_published and row.quantity not in RATIOS:
            alone = QUANTITIES[row.quantity](
                Simulated(row.workload, _slowest(name, row.workload), row.workload, 1.0)
            )
            is_time = row.quantity in ("iteration_seconds", "days_per_epoch")
            rates.append(alone / row.value if is_time else row.value / alone)
    low, middle, high = np.quantile(rates, (TAILS[0], 0.5, TAILS[1])).tolist()
    return middle, low, high


def _baselines(cluster: Cluster, row: Simulated, quantity: str) -> Mapping[str, Range]:
    """Return a dict, by the rule's name, of the predictions by the rules `CONSTANT` and `BUBBLE` of
    `quantity` for the workload of `row`, whose simulated seconds are not used. Each is a Range: at
    the median of the rates of the fitted rows, with the 5th and 95th percentiles as ends. Empty if
    no published row was fitted for the cluster's software."""
    if not any(each.is_published for each in fitted_rows(cluster.software)):
        return {}
    ranges = {}
    for name in (CONSTANT, BUBBLE):
        rates = rates_of(cluster.software, name)
        seconds, first = (_slowest(name, each) for each in (row.workload, row.first))
        ends = [
            QUANTITIES[quantity](
                row._replace(seconds=seconds / rate, first_seconds=first / rates[0])
            )
            for rate in rates
        ]
        ranges[name] = Range(ends[0], min(ends), max(ends))
    return ranges
