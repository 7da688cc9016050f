"""Seals what was measured on this machine as a run."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.catalogue import Experiment
from experiments.verdicts import RECORDS, load_results
from lineage.digest import check_seal, is_sealed, sha256_json
from lineage.errors import BadInput
from lineage.records import Record, write_records
from lineage.run import RunDirectory


def adopt_records(path: Path, runs: Path) -> str:
    """Copy a sealed run with records below `runs`; its machine and commit in a sentence.

    Raises BadInput for a directory without sealed records or one that is there already, IntegrityFailure where a file
    was changed since.
    """
    if not is_sealed(path) or not (path / RECORDS).is_file():
        raise BadInput(f"{path} holds no sealed records: it has no {RECORDS} or was never finished")
    check_seal(path)
    load_results([path])
    made = RunDirectory.open(path).manifest["environment"]
    target = runs / path.resolve().name
    if target.exists():
        raise BadInput(f"{target} is there already")
    shutil.copytree(path, target)
    where = f"{', '.join(made['gpus']) or made['cpu']}, {made['cores']} cores"
    return f"{target}: made on {where}, from commit {(made['source'] or {}).get('commit')}"


Line = dict[str, Any]
"""The fields of a record that a measurement knows."""


def seal_numbers(
    experiment: Experiment, name: str, numbers: Sequence[Line], parents: Mapping[str, str], runs: Path
) -> tuple[RunDirectory, list[Record]]:
    """A sealed run `name` with the numbers as records; the same numbers are found again.

    Its mode is measure where a number is measured as published, else scaled.
    """
    mode = "measure" if any(line["kind"] == "measured" for line in numbers) else "scaled"
    config = {"experiment": experiment.model_dump(mode="json"), "mode": mode, "numbers": sha256_json(numbers)}
    run = RunDirectory.begin(runs, name, "experiment", config, dict(parents))
    digest = sha256_json(config)
    records = [Record(experiment=experiment.name, source=run.path.name, digest=digest, **line) for line in numbers]
    if run.is_complete:
        run.link()
    else:
        write_records(run.path / RECORDS, records)
        run.complete()
    return run, records
