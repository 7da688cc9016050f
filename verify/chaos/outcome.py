"""What a reproduction must have come to, whatever happened on the way: results without times and their digests."""

import csv
from pathlib import Path
from typing import Any

from data_pipeline.files import dataset_digest
from engine.run.directory import read_metrics
from lineage.atomic import read_json
from lineage.chain import complete_checkpoints
from lineage.digest import check_seal, is_sealed, sealed_files, sha256_json
from lineage.records import read_records

TIMED = {
    "seconds", "environment", "checkpoint_digest", "source", "digest", "train_seconds", "tokens_per_second",
    "model_tflops", "created",
}  # fmt: skip
"""Fields of results and columns of tables that say when and how fast, or are digests of files that do."""
OF_THE_MACHINE = {"rank-memory"}
"""Tables of the page that no two runs agree on."""


def outcome(runs: Path) -> dict[str, str]:
    """Digests of token files; of weights, optimizer state and losses; of scores and records; of each table of the page.

    Every seal below `runs` is checked. Raises IntegrityFailure or OSError where something is missing or changed.
    """
    dataset, training, reproduction = (_linked(runs, name) for name in ("tiny", "355m-tiny", "reproduce-355m"))
    for directory in sorted(path.parent for path in runs.rglob("COMPLETE")):
        if is_sealed(directory) and not any(part.startswith(".") for part in directory.relative_to(runs).parts):
            check_seal(directory)
    final = complete_checkpoints(training)[-1]
    tensors = {name: entry for name, entry in sealed_files(final).items() if name.endswith(".safetensors")}
    losses = [(line["kind"], line["iteration"], line["loss"]) for line in read_metrics(training)]
    evaluations = {path.name: _timeless(read_json(path)) for path in (reproduction / "evaluations").iterdir()}
    records = [_timeless(record.model_dump()) for record in read_records(reproduction / "records.jsonl")]
    page = sorted(path for path in (reproduction / "report").rglob("*") if path.is_file())
    tables = {
        f"report {path.stem}": sha256_json(_table(path))
        for path in page
        if path.suffix == ".csv" and path.stem not in OF_THE_MACHINE
    }
    return {
        "data": dataset_digest(dataset),
        "train": sha256_json([final.name, tensors, losses]),
        "evaluate": sha256_json([evaluations, records]),
        "report": sha256_json([path.name for path in page]),
        **tables,
    }


def leftovers(place: Path) -> list[str]:
    """Hidden files and directories of unfinished work."""
    return sorted(str(path.relative_to(place)) for path in (place / "runs").rglob(".*"))


def _linked(runs: Path, name: str) -> Path:
    if not (runs / name).is_symlink():
        raise FileNotFoundError(2, "no link to the newest run", str(runs / name))
    return (runs / name).resolve()


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _timeless(inner) for name, inner in value.items() if name not in TIMED}
    return [_timeless(inner) for inner in value] if isinstance(value, list) else value


def _table(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="") as file:
        return [{name: cell for name, cell in row.items() if name not in TIMED} for row in csv.DictReader(file)]
