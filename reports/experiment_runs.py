"""Runs of experiments, ladders and engines, the origins of the page's numbers."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from mlm_repro.engine.run.files import METRICS, SUMMARY
from mlm_repro.experiments.catalogue import load_experiments
from mlm_repro.experiments.files import EXPERIMENTS, read_runs
from mlm_repro.experiments.verdicts import Results, load_results
from mlm_repro.lineage.digest import check_seal
from mlm_repro.lineage.errors import BadInput, IntegrityFailure, UserError
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

    A run becomes a Problem if it is unfinished, empty, damaged, of an experiment that is not known, or has a number
    that is not its own.
    """
    known = load_experiments()
    loaded, origins, problems = list[Results](), dict[str, Origin](), Problems()
    for path in paths:
        part, run = path.name, f"The run {path.name}"
        try:
            of_run = _origins(path)
            if (first := of_run[0]).manifest.kind == AGAINST:
                check_seal(first.path)
                read_engines(first.path)
                origins[first.name] = first
                continue
            if first.manifest.kind == "reproduction":
                loaded.append(replace(load_results([path]), records=()))
                origins[first.name] = first
                continue
            part = first.experiment if len(of_run) == 1 else part
            results = load_results([path])
            _check_own(results.records, of_run)
        except (UserError, LookupError, TypeError) as error:
            problems.add(part, f"{run} is left out: {one_line(error)}.")
            continue
        if strangers := {origin.experiment for origin in of_run} - known.keys():
            problems.add(part, f"{run} has numbers of {min(strangers)}, which is no experiment now.", damaged=False)
        if not results.records:
            why = "has not finished: its numbers are left out" if results.left_out else "holds no numbers"
            problems.add(part, f"{run} {why}.", damaged=False)
        loaded.append(replace(results, records=tuple(each for each in results.records if each.source not in origins)))
        for origin in of_run:
            if own := [record for record in results.records if record.source == origin.name]:
                origins[origin.name] = replace(origin, seeds=seeds_of(own))
    records = tuple(record for results in loaded for record in results.records)
    findings = {claim: finding for results in reversed(loaded) for claim, finding in results.findings.items()}
    return Results(records, (), findings), list(origins.values()), problems


def _origins(path: Path) -> list[Origin]:
    """A run, or each that a study of experiments keeps."""
    run = RunDirectory.open(path).path
    manifest = read_document(run / MANIFEST, Manifest)
    if manifest.kind != EXPERIMENTS:
        return [Origin(run, manifest)]
    return [Origin(run, parse_document(line.manifest, Manifest, f"{MANIFEST} of {name}"))
            for name, line in read_runs(run).items()]  # fmt: skip


def _check_own(records: Iterable[Record], origins: Iterable[Origin]) -> None:
    """Raise IntegrityFailure for a number that is of another run or experiment, or has no digest."""
    experiments = {origin.name: origin.experiment for origin in origins}
    for record in records:
        if experiments.get(record.source) != record.experiment or not record.digest:
            number = f"{record.series}, {record.quantity}"
            raise IntegrityFailure(f"a number ({number}) has no digest, or is of another run or experiment")


def _newest(folder: Path) -> list[Path]:
    """Runs of experiments and engines that links lead to, and those without a link."""
    here = [path for kind in ("experiment-", EXPERIMENTS, f"{AGAINST}-") for path in sorted(folder.glob(f"{kind}*"))]
    linked = [path for path in here if path.is_symlink() and path.is_dir()]
    names = {path.name for path in linked}
    others = [path for path in here if path.is_dir() and not path.is_symlink()]
    return [*linked, *(path for path in others if path.name.rpartition("-")[0] not in names)]
