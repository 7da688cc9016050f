"""Seals what was measured on this machine as a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.catalogue import Experiment
from experiments.verdicts import RECORDS
from lineage.digest import sha256_json
from lineage.records import Record, write_records
from lineage.run import RunDirectory

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
