"""Seals the numbers of an experiment as a run, and the runs of several experiments as one study."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from mlm_repro.experiments.catalogue import Experiment
from mlm_repro.experiments.files import EXPERIMENTS, NOT_RUN, KeptRun, write_runs
from mlm_repro.lineage.atomic import JSON, write_json
from mlm_repro.lineage.digest import sha256_json
from mlm_repro.lineage.files import read_values
from mlm_repro.lineage.numbers import aligned, show
from mlm_repro.lineage.records import RECORDS, Kind, Record, read_records, write_records
from mlm_repro.lineage.run import RunDirectory

Line = JSON
"""Fields of a record as a measurement gives them; the experiment and the run are added when it is
sealed."""


def lines(
    series: str, values: Mapping[str, float], kind: Kind = "counted", **same: Any
) -> list[Line]:
    """Return a line for each quantity of a series; `same` holds the fields that all lines share."""
    return [
        {"series": series, "quantity": name, "value": value, "kind": kind} | same
        for name, value in values.items()
    ]


def seal_numbers(
    experiment: Experiment,
    ending: str,
    numbers: Sequence[Line],
    runs: Path,
    simulated: JSON | None = None,
    refused: Sequence[Line] = (),
) -> tuple[RunDirectory, list[Record]]:
    """Write the numbers as records into a sealed run of the experiment; return the run and its
    records.

    `ending` is appended to the run's name. A complete run with the same numbers is returned as it
    is. The run's mode is "simulate" if `simulated` states what the numbers were simulated with,
    else "measure" if any number is measured or counted, else "scaled". A simulated run also lists
    the `refused` rows with their reasons.
    """
    about: Line = {"experiment": experiment.name, "source": ""}
    records = [Record(**about | line) for line in numbers]
    measured = (
        "measure" if any(record.kind in ("measured", "counted") for record in records) else "scaled"
    )
    facts: JSON = {
        "mode": measured if simulated is None else "simulate",
        **(simulated or {}),
        "records": digest_of_numbers(records),
        "refused": sha256_json(list(refused)),
    }
    name = f"experiment-{experiment.name.replace('/', '-')}{ending}"
    config = facts | {"experiment": experiment.model_dump(mode="json")}
    settings = facts | {"experiment": experiment.model_dump(mode="json", exclude_defaults=True)}
    run = RunDirectory.begin(runs, name, "experiment", config, {}, settings=settings)
    # A record names its run only now: the run's name depends on the numbers.
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


def gather(made: Sequence[RunDirectory], runs: Path) -> RunDirectory:
    """Seal a study of several experiments' runs below `runs`: one line for each run, and all their
    records.

    A complete study of the same runs is returned as it is.
    """
    about = {"runs": {run.path.name: run.manifest["identity"] for run in made}}
    study = RunDirectory.begin(runs, EXPERIMENTS, EXPERIMENTS, about, {})
    if study.is_complete:
        study.link()
        return study
    write_runs(study.path, {run.path.name: _kept(run.path) for run in made}.values())
    in_order = sorted(made, key=lambda run: run.path.name)
    write_records(
        study.path / RECORDS,
        chain.from_iterable(read_records(run.path / RECORDS) for run in in_order),
    )
    study.complete()
    return study


def _kept(run: Path) -> KeptRun:
    refused = {"refused": read_values(run / NOT_RUN)} if (run / NOT_RUN).is_file() else {}
    return KeptRun.of(run, **refused)


def digest_of_numbers(records: Iterable[Record]) -> str:
    """Return the SHA-256 of the records without the name and digest of their run, which depend on
    it."""
    return sha256_json([record.model_dump(exclude={"source", "digest"}) for record in records])


def format_records(records: Iterable[Record]) -> str:
    """Format one line for each record: series, quantity, x, value, kind and note."""
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
