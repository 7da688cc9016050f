"""Workloads in, predictions out, as CSV files. Imports no torch."""

from collections import defaultdict
from pathlib import Path

from mlm_repro.experiments.benchmark import Table
from mlm_repro.experiments.catalogue import read_rows
from mlm_repro.experiments.simulator.cluster import load_cluster
from mlm_repro.experiments.simulator.measurements import COLUMNS, fitted_workloads, workload_of
from mlm_repro.experiments.simulator.simulate import Prediction, simulate
from mlm_repro.experiments.simulator.workload import NOT_COSTED, NotCosted, Workload
from mlm_repro.lineage.atomic import write_text
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.lock import check_place
from mlm_repro.lineage.progress import announce

INPUTS = ("cluster", "software", *COLUMNS)
RESULTS = (
    "iteration_ms",
    "low_ms",
    "high_ms",
    "tflops_per_gpu",
    "memory_gib",
    "memory_bytes",
    "probability_fits",
    "fitted",
    "extrapolated",
    "fits",
    "reason",
)
"""Columns of a prediction, after the workload's own. `fitted`: true if the cost model was fitted on
this very workload. `extrapolated`: in words how the workload lies outside the fitted rows. `fits`:
true if it can run, else `reason` says why not."""


def simulate_file(rows_path: Path, out: Path) -> tuple[int, int]:
    """Predict every row of `rows_path`, a CSV file of workloads, and write the predictions to
    `out`, a CSV file; return two numbers: how many rows there are, and how many of them cannot run
    and so have a reason in `out`.

    Raises BadInput if the file cannot be read, has no row or lacks a column without a default, or
    if `out` cannot be written or has something else in it; nothing is then written. Raises
    NotCosted after all rows are written, if a row is of a family that is not costed.
    """
    check_place("--out", out, ",".join(INPUTS))
    rows = read_rows(rows_path)
    stated = {*Workload._field_defaults, "software"}.union(*rows[:1])
    if missing := [name for name in INPUTS if name not in stated]:
        raise BadInput(
            f"{rows_path} has no row with the columns {', '.join(missing)}, which its first line"
            f" must name; all columns are {', '.join(INPUTS)}"
        )
    announce(f"predicts {len(rows):,} rows")
    predictions = _predict(rows)
    cells = [
        [*(row.get(name) or "" for name in INPUTS), *_cells(*prediction)]
        for row, prediction in zip(rows, predictions, strict=True)
    ]
    write_text(out, Table((*INPUTS, *RESULTS), cells).csv)
    if others := sum(NOT_COSTED in prediction.reason for prediction, _ in predictions):
        raise NotCosted(
            f"{others} of {len(rows)} rows of {rows_path}: {NOT_COSTED}; {out} has the"
            " predictions of the others"
        )
    return len(rows), sum(bool(prediction.reason) for prediction, _ in predictions)


def _predict(rows: list[dict[str, str]]) -> list[tuple[Prediction, bool]]:
    """Return a list with a pair for every row, in order: its Prediction, and True if the cost model
    was fitted on this very workload. A row is a dict of cells by column. A row that names no valid
    cluster or workload gets a Prediction with the reason alone."""
    predictions = [(Prediction(), False)] * len(rows)
    by_cluster = defaultdict(list)
    clusters = {}
    for index, row in enumerate(rows):
        name = ((row["cluster"] or "").strip(), (row.get("software") or "").strip())
        try:
            if name not in clusters:
                clusters[name] = load_cluster(*name)
            by_cluster[name].append((index, workload_of(row)))
        except BadInput as error:
            predictions[index] = Prediction(reason=str(error)), False
    # The rows of a cluster are simulated in one call: the cost model works on arrays.
    for name, workloads in by_cluster.items():
        cluster = clusters[name]
        known = fitted_workloads(cluster.software)
        predicted = simulate(cluster, [workload for _, workload in workloads])
        for (index, workload), prediction in zip(workloads, predicted, strict=True):
            predictions[index] = prediction, workload in known
    return predictions


def _cells(p: Prediction, fitted: bool) -> tuple[str, ...]:
    fits = str(not p.reason).lower()
    if not p.seconds:
        return ("",) * 9 + (fits, p.reason)
    numbers = (
        1e3 * p.seconds,
        1e3 * p.low_seconds,
        1e3 * p.high_seconds,
        p.tflops_per_gpu,
        p.memory_bytes / 2**30,
    )
    return (
        *(f"{number:.6g}" for number in numbers),
        str(p.memory_bytes),
        f"{p.probability_fits:.4f}",
        str(fitted).lower(),
        p.extrapolated,
        fits,
        p.reason,
    )
