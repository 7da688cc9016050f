"""Seals what was measured on this machine as a run."""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.catalogue import Experiment
from experiments.files import NOT_RUN
from experiments.verdicts import load_results
from lineage.atomic import write_json
from lineage.digest import check_seal, is_sealed, sha256_json
from lineage.errors import BadInput
from lineage.files import Manifest, read_document
from lineage.records import RECORDS, Kind, Record, write_records
from lineage.run import MANIFEST, RunDirectory


def adopt_records(path: Path, runs: Path) -> str:
    """Copy a sealed run with records below `runs`; its machine and commit in a sentence.

    Raises BadInput for a directory without sealed records or one that is there already, IntegrityFailure where a file
    was changed since.
    """
    if not is_sealed(path) or not (path / RECORDS).is_file():
        raise BadInput(f"{path} holds no sealed records: it has no {RECORDS} or was never finished")
    check_seal(path)
    load_results([path])
    made = read_document(path / MANIFEST, Manifest).environment
    target = runs / path.resolve().name
    if target.exists():
        raise BadInput(f"{target} is there already")
    shutil.copytree(path, target)
    where = f"{', '.join(made.gpus) or made.cpu}, {made.cores} cores"
    return f"{target}: made on {where}, from commit {made.source.get('commit')}"


Line = dict[str, Any]
"""The fields of a record that a measurement knows."""


def lines(series: str, values: Mapping[str, float], kind: Kind = "measured", **same: Any) -> list[Line]:
    """A line for each quantity of a series, with what is the `same` of all."""
    return [{"series": series, "quantity": name, "value": value, "kind": kind} | same for name, value in values.items()]


def seal_numbers(
    experiment: Experiment,
    ending: str,
    numbers: Sequence[Line],
    runs: Path,
    parents: Mapping[str, str] | None = None,
    simulated: dict[str, Any] | None = None,
    refused: Sequence[Line] = (),
) -> tuple[RunDirectory, list[Record]]:
    """A sealed run of the experiment, `ending` in its name, with the numbers as records; the same numbers are found
    again.

    Its mode is simulate where it is said what they were `simulated` with, measure where a number is measured as
    published, else scaled. What was `refused` is kept with its reasons.
    """
    about: Line = {"experiment": experiment.name, "source": ""}
    records = [Record(**about | line) for line in numbers]
    measured = "measure" if any(record.kind == "measured" for record in records) else "scaled"
    config: dict[str, Any] = {
        "experiment": experiment.model_dump(mode="json") | {"proxies": []},  # a key of earlier versions
        "mode": measured if simulated is None else "simulate",
        **(simulated or {}),
        "records": digest_of_numbers(records),
        "refused": sha256_json(list(refused)),
    }
    name = f"experiment-{experiment.name.replace('/', '-')}{ending}"
    run = RunDirectory.begin(runs, name, "experiment", config, dict(parents or {}))
    origin = {"source": run.path.name, "digest": sha256_json(config)}
    records = [record.model_copy(update=origin) for record in records]
    if run.is_complete:
        run.link()
    else:
        write_records(run.path / RECORDS, records)
        if simulated is not None:
            write_json(run.path / NOT_RUN, list(refused))
        run.complete()
    return run, records


def digest_of_numbers(records: Iterable[Record]) -> str:
    """Digest of the records without the name and digest of their run, which depend on it."""
    return sha256_json([record.model_dump(exclude={"source", "digest"}) for record in records])


def format_records(records: Iterable[Record]) -> str:
    """A line for each quantity at each place, with its value for each seed."""
    places: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        places.setdefault((record.series, record.quantity, record.x, record.kind), []).append(record)
    return "\n".join(
        f"{series:<44}{quantity:<26}{'' if x is None else f'{x:g}':>8}"
        f"{', '.join(f'{record.value:.4g}' for record in seeds):>12}  {kind:<9}  {seeds[0].note}".rstrip()
        for (series, quantity, x, kind), seeds in places.items()
    )
