"""Workloads in, predictions out, as CSV files. Imports no torch."""

import csv
import io
from collections import defaultdict
from pathlib import Path

from experiments.simulator.cluster import Cluster, load_cluster
from experiments.simulator.measurements import COLUMNS, workload_of
from experiments.simulator.simulate import Prediction, simulate
from experiments.simulator.workload import Workload
from lineage.atomic import check_place, write_text
from lineage.errors import BadInput
from lineage.numbers import csv_cell
from lineage.progress import announce

INPUTS = ("cluster", *COLUMNS)
RESULTS = ("iteration_ms", "low_ms", "high_ms", "tflops_per_gpu", "memory_gib", "memory_bytes",
           "probability_fits", "fits", "reason")  # fmt: skip


def simulate_file(rows_path: Path, out: Path) -> tuple[int, int]:
    """Write a prediction for every row; returns how many there are and how many have a reason in place of numbers.

    Raises BadInput where the file cannot be read, a column without a default is missing, or `out` cannot be written;
    nothing is then left behind.
    """
    check_place("--out", out)
    rows = _read(rows_path)
    announce(f"predicts {len(rows):,} rows")
    predictions = _predict(rows)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow((*INPUTS, *RESULTS))
    for row, prediction in zip(rows, predictions, strict=True):
        writer.writerow((*(csv_cell(row.get(name) or "") for name in INPUTS), *_cells(prediction)))
    write_text(out, buffer.getvalue())
    return len(rows), sum(bool(prediction.reason) for prediction in predictions)


def _read(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            rows = list(reader)
            names = reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{path} cannot be read: {error}") from error
    missing = [name for name in INPUTS if name not in names and name not in Workload._field_defaults]
    if missing:
        raise BadInput(f"{path} has no column {', '.join(missing)}; it needs {', '.join(INPUTS)}")
    return rows


def _predict(rows: list[dict[str, str]]) -> list[Prediction]:
    predictions = [Prediction()] * len(rows)
    asked: dict[str, list[tuple[int, Workload]]] = defaultdict(list)
    clusters: dict[str, Cluster] = {}
    for place, row in enumerate(rows):
        name = (row["cluster"] or "").strip()
        try:
            if name not in clusters:
                clusters[name] = load_cluster(name)
            asked[name].append((place, workload_of(row)))
        except BadInput as error:
            predictions[place] = Prediction(reason=str(error))
    for name, workloads in asked.items():
        answers = simulate(clusters[name], [workload for _, workload in workloads])
        for (place, _), prediction in zip(workloads, answers, strict=True):
            predictions[place] = prediction
    return predictions


def _cells(prediction: Prediction) -> tuple[str, ...]:
    p, fits = prediction, "false" if prediction.reason else "true"
    if not p.seconds:
        return ("",) * 7 + (fits, p.reason)
    numbers = (1e3 * p.seconds, 1e3 * p.low_seconds, 1e3 * p.high_seconds, p.tflops_per_gpu, p.memory_bytes / 2**30)
    return (*(f"{number:.6g}" for number in numbers), str(p.memory_bytes), f"{p.probability_fits:.4f}", fits, p.reason)
