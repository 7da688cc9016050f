"""Seals the numbers of an experiment as a run, and the runs of several experiments as one study."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlm_repro.experiments.catalogue import Experiment
from mlm_repro.experiments.files import EXPERIMENTS, KeptRun, write_runs
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.digest import sha256_json
from mlm_repro.lineage.numbers import aligned, show
from mlm_repro.lineage.records import RECORDS, Kind, Record, read_records, write_records
from mlm_repro.lineage.run import RunDirectory

SCHEMA = 2
"""Version of the configuration of an experiment's run; version 1 had curves predicted from other
curves, `extrapolates`, and digests of rows that could not run, `refused`."""
Line = JSON
"""The fields of a record that a measurement knows."""


def lines(
    series: str, values: Mapping[str, float], kind: Kind = "counted", **same: Any
) -> list[Line]:
    """A line for each quantity of a series, with what is the `same` of all."""
    return [
        {"series": series, "quantity": name, "value": value, "kind": kind} | same
        for name, value in values.items()
    ]


def seal_numbers(
    experiment: Experiment, ending: str, numbers: Sequence[Line], runs: Path
) -> tuple[RunDirectory, list[Record]]:
    """A sealed run of the experiment, `ending` in its name, with the numbers as records; the same
    numbers are found again.

    Its mode is measure where a number is measured or counted, else scaled.
    """
    about: Line = {"experiment": experiment.name, "source": ""}
    records = [Record(**about | line) for line in numbers]
    is_measured = any(record.kind in ("measured", "counted") for record in records)
    facts: JSON = {
        "mode": "measure" if is_measured else "scaled",
        "records": digest_of_numbers(records),
    }
    name = f"experiment-{experiment.name.replace('/', '-')}{ending}"
    config = facts | {"experiment": experiment.model_dump(mode="json")}
    settings = facts | {"experiment": experiment.model_dump(mode="json", exclude_defaults=True)}
    run = RunDirectory.begin(runs, name, "experiment", config, {}, settings=settings, schema=SCHEMA)
    origin = {"source": run.path.name, "digest": sha256_json(config)}
    records = [record.model_copy(update=origin) for record in records]
    if run.is_complete:
        run.link()
    else:
        write_records(run.path / RECORDS, records)
        run.complete()
    return run, records


def gather(made: Sequence[RunDirectory], runs: Path) -> RunDirectory:
    """A sealed study of the runs of several experiments below `runs`: it keeps a line of each, and
    joins their records.

    A study of the same runs is found again.
    """
    about = {"runs": {run.path.name: run.manifest["identity"] for run in made}}
    study = RunDirectory.begin(runs, EXPERIMENTS, EXPERIMENTS, about, {})
    if study.is_complete:
        study.link()
        return study
    write_runs(study.path, {run.path.name: KeptRun.of(run.path) for run in made}.values())
    in_order = sorted(made, key=lambda run: run.path.name)
    write_records(
        study.path / RECORDS,
        [record for run in in_order for record in read_records(run.path / RECORDS)],
    )
    study.complete()
    return study


def digest_of_numbers(records: Iterable[Record]) -> str:
    """Digest of the records without the name and digest of their run, which depend on it."""
    return sha256_json([record.model_dump(exclude={"source", "digest"}) for record in records])


def format_records(records: Iterable[Record]) -> str:
    """A line for each record: series, quantity, place, value, kind and note."""
    return "\n".join(
        aligned(
            [
                (
                    each.series,
                    f"{each.quantity} {each.unit}".strip(),
                    "" if each.x is None else f"{each.x:g}",
                    show(each.value),
                    each.kind,
                    each.note,
                )
                for each in records
            ]
        )
    )
