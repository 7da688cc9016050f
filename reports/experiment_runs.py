"""Runs of experiments, ladders and engines, the origins of the page's numbers."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from mlm_repro.engine.run.files import METRICS, SUMMARY
from mlm_repro.experiments.catalogue import load_experiments
from mlm_repro.experiments.files import EXPERIMENTS, read_runs
from mlm_repro.experiments.verdicts import Results, load_results
from mlm_repro.lineage.digest import check_seal, is_sealed
from mlm_repro.lineage.errors import BadInput, UserError
from mlm_repro.lineage.files import Manifest, one_line, parse_document, read_document
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
    """Directory of the run, or of the study that keeps it."""
    manifest: Manifest
    seeds: tuple[int, ...] = ()
    is_kept: bool = False
    """True if a study of experiments keeps it."""

    @property
    def name(self) -> str:
        """Name of the run's directory."""
        return f"{self.manifest.name}-{self.manifest.identity[:8]}"

    @property
    def experiment(self) -> str:
        """Name of the experiment that it is of."""
        if self.manifest.kind == LADDER:
            return "2019/figure-6"
        return str(self.manifest.config["experiment"]["name"])

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

    A folder of runs gives the newest run of each experiment, and the newest reproduction if none is named. A
    reproduction gives the runs of experiments inside it.

    Raises BadInput without a reproduction, with two, or for a path that is neither a run nor a folder of runs.
    """
    named, folders, experiments = [], [], []
    paths = [*paths]
    further = [path for path in beside if path not in paths]
    for path in (*paths, *further):
        kind = kind_of(path)
        is_kept = kind == "reproduction" and path in further
        if is_kept or kind in ("experiment", EXPERIMENTS, "ablation", LADDER, AGAINST):
            experiments.append(path)
        elif kind == "reproduction":
            named.append(path)
        elif kind:
            advice = f": `mlm-report run {path}` writes its page" if kind == "training" else ""
            raise BadInput(f"{path} is neither a reproduction nor a run of an experiment, but a {kind}{advice}")
        else:
            folders += [path] * (path not in further)
            experiments += _newest(path)
            experiments += [path / LADDER] if (path / LADDER / RECORDS).is_file() else []
    reproductions = list(dict.fromkeys(path.resolve() for path in named or map(newest_reproduction, folders)))
    if len(reproductions) != 1:
        names = ", ".join(path.name for path in reproductions) or "none"
        raise BadInput(f"a page is made of one reproduction; named here: {names}")
    experiments = [*_newest(reproductions[0]), *experiments]
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
    origins, problems = dict[str, Origin](), Problems()
    read = cache(lambda path: load_results([path]))
    for path in paths:
        part = path.name
        try:
            for origin in _origins(path):
                if origin.name in origins:
                    continue
                if origin.manifest.kind == AGAINST:
                    check_seal(origin.path)
                    read_engines(origin.path)
                    origins[origin.name] = origin
                    continue
                if origin.manifest.kind == "reproduction":
                    loaded.append(replace(load_results([path]), records=()))
                    origins[origin.name] = origin
                    continue
                part = path.name if origin.is_kept else origin.experiment
                results = _read(origin, origin.experiment in known, problems, read)
                loaded.append(results)
                if results.records:
                    origins[origin.name] = replace(origin, seeds=seeds_of(results.records))
        except (UserError, KeyError, TypeError) as error:
            problems.add(part, f"The run {path.name} is left out: {one_line(error)}.")
    records = tuple(record for results in loaded for record in results.records)
    findings = {claim: finding for results in reversed(loaded) for claim, finding in results.findings.items()}
    return Results(records, (), findings), list(origins.values()), problems


def _origins(path: Path) -> Iterator[Origin]:
    """A run, or each that a study of experiments keeps."""
    run = RunDirectory.open(path).path
    manifest = read_document(run / MANIFEST, Manifest)
    if manifest.kind != EXPERIMENTS:
        yield Origin(run, manifest)
        return
    for name, line in read_runs(run).items():
        yield Origin(run, parse_document(line.manifest, Manifest, f"{MANIFEST} of {name}"), is_kept=True)


def _newest(folder: Path) -> list[Path]:
    """Runs of experiments and engines that links lead to, and those without a link."""
    here = [path for kind in ("experiment-", EXPERIMENTS, f"{AGAINST}-") for path in sorted(folder.glob(f"{kind}*"))]
    linked = [path for path in here if path.is_symlink() and path.is_dir()]
    names = {path.name for path in linked}
    others = [path for path in here if path.is_dir() and not path.is_symlink()]
    return [*linked, *(path for path in others if path.name.rpartition("-")[0] not in names)]


def _read(origin: Origin, is_known: bool, problems: Problems, load: Callable[[Path], Results]) -> Results:
    """Results of a run that may be shown; a Problem for each that may not."""
    path, experiment = origin.path, origin.experiment
    name = origin.name if origin.is_kept else path.name
    run = f"The run {name}"
    if not is_known:
        problems.add(experiment, f"{run} is left out: there is no experiment {experiment} now.", damaged=False)
    elif not is_sealed(path):
        problems.add(experiment, f"{run} has not finished: its numbers are left out.", damaged=False)
    elif not (path / RECORDS).is_file():
        problems.add(experiment, f"{run} has no result records ({RECORDS}).")
    else:
        results, shown = load(path), []
        if origin.is_kept:
            records = tuple(record for record in results.records if record.source == name)
            results = replace(results, records=records)
        for record in results.records:
            if reason := _refusal(record, experiment, origin.name):
                what = f"A number of {name} ({record.series}, {record.quantity})"
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
