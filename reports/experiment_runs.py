"""Runs of experiments, ladders and engines, the origins of the page's numbers."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from mlm_repro.engine.run.files import METRICS, SUMMARY
from mlm_repro.experiments.catalogue import load_experiments
from mlm_repro.experiments.verdicts import Results, load_results
from mlm_repro.lineage.digest import check_seal, is_sealed
from mlm_repro.lineage.errors import BadInput, UserError
from mlm_repro.lineage.files import Manifest, one_line, read_document
from mlm_repro.lineage.records import RECORDS, Record
from mlm_repro.lineage.run import MANIFEST, RunDirectory
from mlm_repro.reports.engines import read_engines
from mlm_repro.reports.load import Problems, newest_reproduction

LADDER = "ladder"
"""Kind of a ladder's run, and name of the link to the newest; its numbers stand beside Figure 6 of 2019."""
AGAINST = "against"
"""Kind of a run of `mlm-verify against`."""


@dataclass(frozen=True)
class Origin:
    """A run behind numbers on the page."""

    path: Path
    manifest: Manifest
    seeds: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Name of the run's directory."""
        return f"{self.manifest.name}-{self.manifest.identity[:8]}"

    @property
    def created(self) -> str:
        """Time of the run's start."""
        return self.manifest.created.replace("T", " ").replace("+00:00", " UTC")

    @property
    def commit(self) -> str:
        """Commit of the code; empty if it was not recorded."""
        return str(self.manifest.environment.source.get("commit") or "")


def seeds_of(records: Iterable[Record]) -> tuple[int, ...]:
    """Sorted seeds of some records."""
    return tuple(sorted({record.seed for record in records if record.seed is not None}))


def sort_runs(paths: Iterable[Path], beside: Iterable[Path] = ()) -> tuple[Path, list[Path]]:
    """Find the reproduction among `paths` and the runs that stand beside it, all of `beside` among them.

    A folder of runs gives the newest run of each experiment, and the newest reproduction if none is named.

    Raises BadInput without a reproduction, with two, or for a path that is neither a run nor a folder of runs.
    """
    named, folders, experiments = [], [], []
    paths = [*paths]
    further = [path for path in beside if path not in paths]
    for path in (*paths, *further):
        kind = kind_of(path)
        if kind in ("experiment", "ablation", LADDER, AGAINST) or (kind == "reproduction" and path in further):
            experiments.append(path)
        elif kind == "reproduction":
            named.append(path)
        elif kind:
            raise BadInput(f"{path} is neither a reproduction nor a run of an experiment: its kind is {kind}")
        else:
            folders += [path] * (path not in further)
            experiments += [*_newest(path, "experiment"), *_newest(path, AGAINST)]
            experiments += [path / LADDER] if (path / LADDER / RECORDS).is_file() else []
    reproductions = list(dict.fromkeys(path.resolve() for path in named or map(newest_reproduction, folders)))
    if len(reproductions) != 1:
        names = ", ".join(path.name for path in reproductions) or "none"
        raise BadInput(f"a page is made of one reproduction; named here: {names}")
    others = {path.resolve().name: path.resolve() for path in experiments if path.resolve() != reproductions[0]}
    return reproductions[0], list(others.values())


def kind_of(path: Path) -> str:
    """Kind of the run in a directory, by its files and manifest; empty without a run."""
    if not path.is_dir():
        raise BadInput(f"{path} is not a directory")
    if (path / SUMMARY).is_file() and not (path / METRICS).is_file():
        return "reproduction"
    if not (path / MANIFEST).exists():
        return "experiment" if (path / RECORDS).exists() else ""
    try:
        return str(RunDirectory.open(path).manifest["kind"])
    except (UserError, KeyError):
        return "experiment"


def load_experiment_runs(paths: Iterable[Path]) -> tuple[Results, list[Origin], Problems]:
    """Results and origins of the runs of experiments that have records, and problems under the experiments' names.

    An unfinished, empty or damaged run becomes a Problem, and so does a refused record.
    """
    known = load_experiments()
    loaded: list[Results] = []
    origins, problems = list[Origin](), Problems()
    for path in paths:
        name = path.name
        try:
            run = RunDirectory.open(path).path
            origin = Origin(run, read_document(run / MANIFEST, Manifest))
            if origin.manifest.kind == AGAINST:
                check_seal(run)
                read_engines(run)
                origins.append(origin)
                continue
            if origin.manifest.kind == "reproduction":
                loaded.append(replace(load_results([run]), records=()))
                origins.append(origin)
                continue
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
    findings = {claim: finding for results in reversed(loaded) for claim, finding in results.findings.items()}
    return Results(records, (), findings), origins, problems


def _newest(folder: Path, kind: str) -> list[Path]:
    """Runs that the links `KIND-*` lead to, and runs without a link."""
    linked = [path for path in sorted(folder.glob(f"{kind}-*")) if path.is_symlink() and path.is_dir()]
    names = tuple(f"{path.name}-" for path in linked)
    others = (path for path in sorted(folder.glob(f"{kind}-*")) if path.is_dir() and not path.is_symlink())
    return [*linked, *(path for path in others if path.name.rpartition("-")[0] + "-" not in names)]


def _read(origin: Origin, experiment: str, is_known: bool, problems: Problems) -> Results:
    """Results of a run that may be shown; a Problem for each that may not."""
    run, path = f"The run {origin.path.name}", origin.path
    if not is_known:
        problems.add(experiment, f"{run} is left out: there is no experiment {experiment} now.", damaged=False)
    elif not is_sealed(path):
        problems.add(experiment, f"{run} has not finished: its numbers are left out.", damaged=False)
    elif not (path / RECORDS).is_file():
        problems.add(experiment, f"{run} has no result records ({RECORDS}).")
    else:
        results, shown = load_results([path]), []
        for record in results.records:
            if reason := _refusal(record, experiment, origin.name):
                what = f"A number of {path.name} ({record.series}, {record.quantity})"
                problems.add(experiment, f"{what} is left out: {reason}.")
            else:
                shown.append(record)
        if not results.records:
            problems.add(experiment, f"{run} holds no numbers.", damaged=False)
        return replace(results, records=tuple(shown))
    return Results((), (), {})


def _refusal(record: Record, experiment: str, run: str) -> str | None:
    if record.experiment != experiment:
        return f"it belongs to {record.experiment}"
    if record.source != run:
        return f"it names {record.source or 'nothing'} as its run"
    return None if record.digest else "it has no digest"
