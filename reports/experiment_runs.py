"""Runs of the catalogue's experiments, and where every number on the page came from."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.catalogue import load_experiments
from experiments.verdicts import NOT_RUN, Results, load_results
from lineage.digest import is_sealed
from lineage.errors import BadInput, UserError
from lineage.files import one_line
from lineage.records import Record
from lineage.run import MANIFEST, RunDirectory
from reports.files import Problem
from reports.load import RECORDS, SUMMARY, newest_reproduction


@dataclass(frozen=True)
class Origin:
    """A run behind numbers on the page."""

    name: str
    kind: str
    created: str
    commit: str
    """Empty where it was not recorded."""
    is_dirty: bool
    config_digest: str
    inputs: dict[str, str]
    """Digest of each input."""
    hardware: str
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class ExperimentRuns:
    """What the given runs of experiments hold."""

    results: Results
    origins: tuple[Origin, ...]
    problems: tuple[Problem, ...]
    """Each under the name of its experiment."""
    given: bool
    """Whether there was any run of an experiment, good or bad."""
    directories: tuple[Path, ...] = ()
    """Of the runs that have records here."""


def origin_of(manifest: dict[str, Any], records: Iterable[Record]) -> Origin:
    """Where the numbers of a run came from, as its manifest says."""
    environment = manifest.get("environment", {})
    source = environment.get("source", {})
    cores = environment.get("cores")
    hardware = [str(environment.get("cpu") or ""), f"{cores} cores" if cores else "", *environment.get("gpus", [])]
    return Origin(
        run_name(manifest),
        str(manifest.get("kind", "")),
        str(manifest.get("created", "")).replace("T", " ").replace("+00:00", " UTC"),
        str(source.get("commit") or ""),
        bool(source.get("dirty")),
        str(manifest.get("config_digest", "")),
        {str(name): str(digest) for name, digest in manifest.get("parents", {}).items()},
        ", ".join(part for part in hardware if part),
        tuple(sorted({record.seed for record in records if record.seed is not None})),
    )


def run_name(manifest: dict[str, Any]) -> str:
    """The name of the directory that the run was written to."""
    return f"{manifest.get('name', '')}-{str(manifest.get('identity', ''))[:8]}"


def sort_runs(paths: Iterable[Path]) -> tuple[Path, list[Path]]:
    """The reproduction and the runs of experiments among `paths`; of a folder of runs, the newest of each experiment,
    and its newest reproduction where none is named.

    Raises BadInput without a reproduction, with two, or for a path that is neither a run nor a folder of runs.
    """
    named, folders, experiments = [], [], []
    for path in paths:
        kind = _kind(path)
        if kind == "experiment":
            experiments.append(path)
        elif kind == "reproduction":
            named.append(path)
        elif kind:
            raise BadInput(f"{path} is neither a reproduction nor a run of an experiment: its kind is {kind}")
        else:
            folders.append(path)
            experiments += _newest_experiments(path)
    reproductions = list(dict.fromkeys(path.resolve() for path in named or map(newest_reproduction, folders)))
    if len(reproductions) != 1:
        names = ", ".join(path.name for path in reproductions) or "none"
        raise BadInput(f"a page is made of one reproduction; named here: {names}")
    return reproductions[0], list({path.resolve().name: path.resolve() for path in experiments}.values())


def load_experiment_runs(paths: Iterable[Path]) -> ExperimentRuns:
    """Records of the experiments' runs. A run that is unfinished, empty or damaged, and a record that is refused,
    becomes a Problem; the others stand.
    """
    known = load_experiments()
    records: list[Record] = []
    refused: dict[tuple[str, str, float | None], str] = {}
    origins, directories, problems, given = [], [], [], False
    for path in paths:
        given = True
        name = path.name
        try:
            manifest = RunDirectory.open(path).manifest
            name = str(manifest["config"]["experiment"]["name"])
            read = _read(path, name, name in known)
        except (UserError, KeyError, TypeError, AttributeError) as error:
            problems.append(Problem(name, f"The run {path.name} is left out: {one_line(error)}.", damaged=True))
            continue
        problems += read.problems
        records += read.results.records
        refused = read.results.refused | refused
        if read.results.records:
            origins.append(origin_of(manifest, read.results.records))
            directories.append(path.resolve())
    results = Results(tuple(records), refused, ())
    return ExperimentRuns(results, tuple(origins), tuple(problems), given, tuple(directories))


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


def _read(path: Path, experiment: str, is_known: bool) -> ExperimentRuns:
    def problem(sentence: str, damaged: bool) -> ExperimentRuns:
        return ExperimentRuns(Results((), {}, ()), (), (Problem(experiment, sentence, damaged),), True)

    if not is_known:
        return problem(f"The run {path.name} is left out: there is no experiment {experiment} now.", False)
    if not is_sealed(path):
        return problem(f"The run {path.name} has not finished: its numbers are left out.", False)
    if not (path / RECORDS).is_file():
        return problem(f"The run {path.name} has no result records ({RECORDS}).", True)
    results = load_results([path])
    kept, problems = [], []
    for record in results.records:
        reason = _refusal(record, experiment, run_name(RunDirectory(path).manifest))
        if reason:
            sentence = f"A number of {path.name} ({record.series}, {record.quantity}) is left out: {reason}."
            problems.append(Problem(experiment, sentence, damaged=True))
        else:
            kept.append(record)
    if not results.records:
        has_reasons = (path / NOT_RUN).is_file() and results.refused
        why = "none of its rows can run" if has_reasons else "it is empty"
        problems.append(Problem(experiment, f"The run {path.name} holds no numbers: {why}.", damaged=False))
    return ExperimentRuns(Results(tuple(kept), results.refused, ()), (), tuple(problems), True)


def _refusal(record: Record, experiment: str, run: str) -> str | None:
    if record.experiment != experiment:
        return f"it belongs to {record.experiment}"
    if record.source != run:
        return f"it names {record.source or 'nothing'} as its run"
    return None if record.digest else "it has no digest"
