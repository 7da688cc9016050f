"""Runs of simulated and computed numbers, as earlier versions sealed them: they verify and stand on
a page."""

from pathlib import Path

from mlm_repro.experiments.catalogue import Experiment
from mlm_repro.experiments.files import NOT_RUN
from mlm_repro.experiments.sealed import SCHEMA, Line, digest_of_numbers
from mlm_repro.experiments.worked_out import work_out
from mlm_repro.lineage.atomic import JSON, write_json
from mlm_repro.lineage.digest import sha256_json
from mlm_repro.lineage.records import RECORDS, write_records
from mlm_repro.lineage.run import RunDirectory


def seal_simulated(
    experiment: Experiment, runs: Path, refused: list[Line] | None = None
) -> RunDirectory:
    """Seal all that follows for an experiment; by default `refused` are the rows that cannot
    run."""
    worked = work_out(experiment)
    rows = list(worked.refused) if refused is None else refused
    records = [each.record.model_copy(update={"digest": None}) for each in worked.numbers]
    facts: JSON = {
        "mode": "simulate",
        "records": digest_of_numbers(records),
        "refused": sha256_json(rows),
    }
    name = f"experiment-{experiment.name.replace('/', '-')}"
    config = facts | {"experiment": experiment.model_dump(mode="json")}
    settings = facts | {"experiment": experiment.model_dump(mode="json", exclude_defaults=True)}
    run = RunDirectory.begin(runs, name, "experiment", config, {}, settings=settings, schema=SCHEMA)
    if not run.is_complete:
        origin = {"source": run.path.name, "digest": sha256_json(config)}
        write_records(run.path / RECORDS, [each.model_copy(update=origin) for each in records])
        write_json(run.path / NOT_RUN, rows)
        run.complete()
    return run
