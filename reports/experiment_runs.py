"""Runs of the catalogue's experiments, and where every number on the page came from."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from engine.run.files import SUMMARY
from experiments.catalogue import load_experiments
from experiments.verdicts import Results, load_results
from lineage.digest import is_sealed
from lineage.errors import BadInput, UserError
from lineage.files import Manifest, one_line, read_document
from lineage.records import RECORDS, Record
from lineage.run import MANIFEST, RunDirectory
from reports.files import Problem, Problems
from reports.load import newest_reproduction

LADDER = "ladder"
"""Kind of a run, and the link to the newest, whose numbers stand beside Figure 6 of the 2019 paper."""


@dataclass(frozen=True)
class Origin:
    """A run behind numbers on the page."""

    path: Path
    manifest: Manifest
    seeds: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Of the directory that the run was written to."""
        return f"{self.manifest.name}-{self.manifest.identity[:8]}"

    @property
    def created(self) -> str:
        """When it was begun."""
        return self.manifest.created.replace("T", " ").replace("+00:00", " UTC")

    @property
    def commit(self) -> str:
        """Empty where it was not recorded."""
        return str(self.manifest.environment.source.get("commit") or "")

    @property
    def hardware(self) -> str:
        """Processor, cores and GPUs; empty where they were not recorded."""
        started = self.manifest.environment
        cores = f"{started.cores} cores" if started.cores else ""
        return ", ".join(part for part in (started.cpu, cores, *started.gpus) if part)


@dataclass(frozen=True)
class ExperimentRuns:
    """What the given runs of experiments hold."""

    results: Results
    origins: tuple[Origin, ...]
    """Those that have records here."""
    problems: tuple[Problem, ...]
    """Each under the name of its experiment."""


def seeds_of(records: Iterable[Record]) -> tuple[int, ...]:
    """The seeds behind some records."""
    return tuple(sorted({record.seed for record in records if record.seed is not None}))


def sort_runs(paths: Iterable[Path]) -> tuple[Path, list[Path]]:
    """The reproduction and the runs of experiments among `paths`; of a folder of runs, the newest of each experiment,
    and its newest reproduction where none is named.

    Raises BadInput without a reproduction, with two, or for a path that is neither a run nor a folder of runs.
    """
    named, folders, experiments = [], [], []
    for path in paths:
        kind = _kind(path)
        if kind in ("experiment", "ablation", LADDER):
            experiments.append(path)
        elif kind == "reproduction":
            named.append(path)
        elif kind:
            raise BadInput(f"{path} is neither a reproduction nor a run of an experiment: its kind is {kind}")
        else:
            folders.append(path)
            experiments += _newest_experiments(path)
            experiments += [path / LADDER] if (path / LADDER / RECORDS).is_file() else []
    reproductions = list(dict.fromkeys(path.resolve() for path in named or map(newest_reproduction, folders)))
    if len(reproductions) != 1:
        names = ", ".join(path.name for path in reproductions) or "none"
        raise BadInput(f"a page is made of one reproduction; named here: {names}")
    return reproductions[0], list({path.resolve().name: path.resolve() for path in experiments}.values())


def is_ladder(path: Path) -> bool:
    """Whether the directory is a ladder's run."""
    return _kind(path) == LADDER


def load_experiment_runs(paths: Iterable[Path]) -> ExperimentRuns:
    """Records of the experiments' runs. A run that is unfinished, empty or damaged, and a record that is refused,
    becomes a Problem; the others stand.
    """
    known = load_experiments()
    loaded: list[Results] = []
    origins, problems = [], Problems()
    for path in paths:
        name = path.name
        try:
            run = RunDirectory.open(path).path
            origin = Origin(run, read_document(run / MANIFEST, Manifest))
            is_ladder = origin.manifest.kind == LADDER
            name = "2019/figure-6" if is_ladder else str(origin.manifest.config["experiment"]["name"])
            results = _read(origin, name, name in known, problems)
        except (UserError, KeyError, TypeError) as error:
            problems.add(name, f"The run {path.name} is left out: {one_line(error)}.")
            continue
        loaded.append(results)
        if results.records:
            origins.append(replace(origin, seeds=seeds_of(results.records)))
    records = tuple(record for results in loaded for record in results.records)
    refused = {place: reason for results in reversed(loaded) for place, reason in results.refused.items()}
    findings = {claim: finding for results in reversed(loaded) for claim, finding in results.findings.items()}
    return ExperimentRuns(Results(records, refused, (), findings), tuple(origins), tuple(problems))


def _kind(path: Path) -> str:
    """What kind of run a directory is, by what lies in it and its manifest; empty for none."""
    if not path.is_dir():
        raise BadInput(f"{path} is not a directory")
    if (path / SUMMARY).is_file():
        return "reproduction"
    if not (path / MANIFEST).exists():
        return "experiment" if (path / RECORDS).exists() else ""
    try:
        return str(RunDirectory.open(path).manifest["kind"])
    except (UserError, KeyError):
        return "experiment"


def _newest_experiments(folder: Path) -> list[Path]:
    """The runs that the links `experiment-*` lead to, and those without a link."""
    linked = [path for path in sorted(folder.glob("experiment-*")) if path.is_symlink() and path.is_dir()]
    names = tuple(f"{path.name}-" for path in linked)
    others = (path for path in sorted(folder.glob("experiment-*")) if path.is_dir() and not path.is_symlink())
    return [*linked, *(path for path in others if path.name.rpartition("-")[0] + "-" not in names)]


def _read(origin: Origin, experiment: str, is_known: bool, problems: Problems) -> Results:
    """What a run holds that may be shown."""
    run, path = f"The run {origin.path.name}", origin.path
    if not is_known:
        problems.add(experiment, f"{run} is left out: there is no experiment {experiment} now.", damaged=False)
    elif not is_sealed(path):
        problems.add(experiment, f"{run} has not finished: its numbers are left out.", damaged=False)
    elif not (path / RECORDS).is_file():
        problems.add(experiment, f"{run} has no result records ({RECORDS}).")
    else:
        results, kept = load_results([path]), []
        for record in results.records:
            if reason := _refusal(record, experiment, origin.name):
                what = f"A number of {path.name} ({record.series}, {record.quantity})"
                problems.add(experiment, f"{what} is left out: {reason}.")
            else:
                kept.append(record)
        if not results.records:
            why = "none of its rows can run" if results.refused else "it is empty"
            problems.add(experiment, f"{run} holds no numbers: {why}.", damaged=False)
        return replace(results, records=tuple(kept))
    return Results((), {}, (), {})


def _refusal(record: Record, experiment: str, run: str) -> str | None:
    if record.experiment != experiment:
        return f"it belongs to {record.experiment}"
    if record.source != run:
        return f"it names {record.source or 'nothing'} as its run"
    return None if record.digest else "it has no digest"
