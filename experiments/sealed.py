"""Seals the numbers of an experiment as a run, and the runs of several experiments as one study."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
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
"""A dict of the fields of a record as a measurement gives them; the experiment and the run are
added when the line is sealed."""


def lines(
    series: str, values: Mapping[str, float], kind: Kind = "counted", **same: Any
) -> list[Line]:
    """Return a list with a line, a dict with a record's fields, for each quantity of the series
    `series`: `values` has the values by quantity, all of one kind, `counted` by default; `same` has
    fields that all lines share."""
    return [
        {"series": series, "quantity": name, "value": value, "kind": kind} | same
        for name, value in values.items()
    ]


def seal_numbers(
    experiment: Experiment, ending: str, numbers: Sequence[Line], runs: Path
) -> tuple[RunDirectory, list[Record]]:
    """Write the numbers, dicts with a record's fields, as records into a sealed run of the
    experiment below the folder `runs`; return a pair, the run's RunDirectory and a list of its
    Records.

    `ending` is appended to the run's name. A complete run with the same numbers is returned as it
    is. The run's mode is "measure" if any number is measured or counted, else "scaled". Raises
    BadInput and IntegrityFailure as `RunDirectory.begin` does.
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
    # A record names its run only now: the run's name depends on the numbers.
    origin = {"source": run.path.name, "digest": sha256_json(config)}
    records = [record.model_copy(update=origin) for record in records]
    if run.is_complete:
        run.link()
    else:
        write_records(run.path / RECORDS, records)
        run.complete()
    return run, records


def gather(made: Sequence[RunDirectory], runs: Path) -> RunDirectory:
    """Seal the finished runs of several experiments as one study below the folder `runs`:
    runs.jsonl with a line for each run, and records.jsonl with all their records; return the
    study's RunDirectory.

    A complete study of the same runs is returned as it is. Raises BadInput if a run's records
    cannot be read, IntegrityFailure if its other files cannot, and both as `RunDirectory.begin`
    does.
    """
    about = {"runs": {run.path.name: run.manifest["identity"] for run in made}}
    study = RunDirectory.begin(runs, EXPERIMENTS, EXPERIMENTS, about, {})
    if study.is_complete:
        study.link()
        return study
    write_runs(study.path, {run.path.name: KeptRun.of(run.path) for run in made}.values())
    in_order = sorted(run.path for run in made)
    write_records(
        study.path / RECORDS,
        chain.from_iterable(read_records(path / RECORDS) for path in in_order),
    )
    study.complete()
    return study


def digest_of_numbers(records: Iterable[Record]) -> str:
    """Return the SHA-256, as hexadecimal text, of the records in their order without `source`, the
    name of their run, and `digest`, the run's digest: both depend on this SHA-256."""
    return sha256_json([record.model_dump(exclude={"source", "digest"}) for record in records])


def format_records(records: Iterable[Record]) -> str:
    """Return one text with an aligned line for each record: series, quantity with its unit, x,
    value, kind and note."""
    return "\n".join(
        aligned(
            [
                (
                    record.series,
                    f"{record.quantity} {record.unit}".strip(),
                    "" if record.x is None else f"{record.x:g}",
                    show(record.value),
                    record.kind,
                    record.note,
                )
                for record in records
            ]
        )
    )
