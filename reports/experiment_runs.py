"""Runs of experiments and engines, the origins of the page's numbers."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from mlm_repro.experiments.catalogue import ABLATION
from mlm_repro.experiments.files import EXPERIMENTS, read_runs
from mlm_repro.experiments.verdicts import Results, load_results
from mlm_repro.lineage.digest import check_seal, is_sealed
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from mlm_repro.lineage.files import Manifest, parse_document, read_document
from mlm_repro.lineage.records import Record
from mlm_repro.lineage.run import MANIFEST
from mlm_repro.reports.engines import read_engines
from mlm_repro.reports.load import Reproduction, newest_reproduction

AGAINST = "against"
"""Kind of a run of `mlm-verify against`, and the beginning of its directory's name."""


@dataclass(frozen=True)
class Origin:
    """Run that numbers on the page come from: `path`, its directory or that of the study that keeps
    it; its `manifest`; and `seeds`, a tuple of the seeds of its numbers, by default empty. The
    properties `name` and `experiment` are the run's name and its experiment's."""

    path: Path
    """Directory of the run, or of the study that keeps it."""
    manifest: Manifest
    seeds: tuple[int, ...] = ()

    @classmethod
    def of(cls, run: Reproduction) -> "Origin":
        """Return the Origin of the reproduction `run`: its directory, its manifest, and the seeds
        of its records."""
        return cls(run.directory, run.manifest, seeds_of(run.records))

    @property
    def name(self) -> str:
        """Name that the run's directory was given, NAME-IDENTITY with eight characters of the
        identity, also if a study keeps the run."""
        return f"{self.manifest.name}-{self.manifest.identity[:8]}"

    @property
    def experiment(self) -> str:
        """Name of the experiment that the run's numbers belong to. Raises KeyError for a
        reproduction and a comparison of engines, which have none."""
        return str(self.manifest.config["experiment"]["name"])


def seeds_of(records: Iterable[Record]) -> tuple[int, ...]:
    """Return a tuple of the seeds that records have, sorted, each once."""
    return tuple(sorted({record.seed for record in records if record.seed is not None}))


def sort_runs(paths: Iterable[Path], beside: Iterable[Path] = ()) -> tuple[Path, list[Path]]:
    """Return a pair: the directory of the reproduction among `paths`, and a list of the directories
    of the runs that stand beside it, including those that `beside` names, runs of any kind or
    folders of runs. All paths are resolved; of several runs whose directories have one name, only
    the last is listed.

    A folder of runs gives its experiments and its comparisons of engines, by the links to the
    newest of each where there are links; such a folder among `paths` also gives its newest
    reproduction if `paths` name no reproduction. The reproduction gives the experiments and
    comparisons inside it likewise.

    Raises BadInput unless `paths` give exactly one reproduction, for a path that is not a
    directory, and for a run of another kind among `paths`, such as a training; IntegrityFailure if
    a manifest is damaged.
    """
    given = {path: kind_of(path) for path in paths}
    for path, kind in given.items():
        if kind not in ("", "reproduction", "experiment", EXPERIMENTS, ABLATION, AGAINST):
            advice = f": `mlm-report run {path}` writes its page" if kind == "training" else ""
            raise BadInput(
                f"{path} is neither a reproduction nor a run of an experiment or of `mlm-verify"
                f" against`, but of the kind {kind}, which the page does not show{advice}"
            )
    named = [path for path, kind in given.items() if kind == "reproduction"]
    reproductions = named or [newest_reproduction(path) for path, kind in given.items() if not kind]
    own, *others = dict.fromkeys(path.resolve() for path in reproductions) or [Path()]
    if others or not reproductions:
        names = ", ".join(path.name for path in (own, *others)) if reproductions else "none"
        raise BadInput(
            f"a page is made of exactly one reproduction, and the RUNs that are named give {names}:"
            " name one reproduction"
        )
    runs = []
    for path in (own, *(path for path in given if path not in named), *beside):
        runs += [path] if path != own and kind_of(path) else _newest(path)
    # By resolved name, because a link and the directory that it leads to are one run.
    by_name = {run.name: run for run in map(Path.resolve, runs) if run != own}
    return own, list(by_name.values())


def kind_of(path: Path) -> str:
    """Return the kind of the run in the directory `path` as its manifest names it, such as
    `training`; an empty text if it has no manifest. Raises BadInput if the path is not a directory,
    IntegrityFailure if the manifest is damaged."""
    if not path.is_dir():
        raise BadInput(
            f"{path} is not a directory: name a run or a folder of runs; without a name it is"
            " `runs` in the working directory"
        )
    return read_document(path / MANIFEST, Manifest).kind if (path / MANIFEST).exists() else ""


def load_experiment_runs(paths: Sequence[Path]) -> tuple[Results, list[Origin]]:
    """Read runs, each given by its own directory. Return a pair: the Results of the sealed runs of
    experiments, and a list of an Origin for each sealed run that has numbers, is a reproduction or
    compares two engines. A run without a seal is only named, in `left_out` of the results.

    Raises IntegrityFailure or BadInput for a damaged run, and IntegrityFailure for a number that
    belongs to another run or experiment or has no digest.
    """
    finished = [path for path in paths if is_sealed(path)]
    origins = {origin.name: origin for origin in chain.from_iterable(map(_origins, finished))}
    results = load_results(
        [path for path in finished if kind_of(path) not in ("reproduction", AGAINST)]
    )
    records = tuple(dict.fromkeys(results.records))  # two studies may keep one run
    by_run = defaultdict(list)
    for record in records:
        origin = origins.get(record.source)
        if not (origin and record.digest and origin.experiment == record.experiment):
            raise IntegrityFailure(
                f"a number ({record.series}, {record.quantity}) has no digest, or belongs to"
                f" another run or experiment than {record.source}, which its record names: run that"
                " experiment again"
            )
        by_run[record.source].append(record)
    shown = [
        replace(origin, seeds=seeds_of(by_run[name]))
        for name, origin in origins.items()
        if by_run[name] or origin.manifest.kind in ("reproduction", AGAINST)
    ]
    left_out = tuple(
        f"{path} was never finished (it has no seal): left out"
        for path in paths
        if path not in finished
    )
    return Results(records, left_out, results.findings), shown


def _origins(path: Path) -> list[Origin]:
    """Return a list of the Origin of the run in the directory `path` or, for a study of
    experiments, of each run that it keeps. A comparison of engines is checked first, its seal and
    its record. Raises IntegrityFailure or BadInput for a damaged run."""
    manifest = read_document(path / MANIFEST, Manifest)
    if manifest.kind == AGAINST:
        check_seal(path)
        read_engines(path)
    if manifest.kind != EXPERIMENTS:
        return [Origin(path, manifest)]
    return [
        Origin(path, parse_document(line.manifest, Manifest, f"{MANIFEST} of {name}"))
        for name, line in read_runs(path).items()
    ]


def _newest(folder: Path) -> list[Path]:
    """Return a list of the directories in a folder that are named like runs of experiments or like
    comparisons of engines: first the links, which lead to the newest runs, then each directory
    whose name, up to its last hyphen, no link has."""
    here = []
    for start in ("experiment-*", f"{EXPERIMENTS}*", f"{AGAINST}-*"):
        here += [path for path in sorted(folder.glob(start)) if path.is_dir()]
    linked = [path for path in here if path.is_symlink()]
    names = {path.name for path in linked}
    return linked + [
        path for path in here if path not in linked and path.name.rpartition("-")[0] not in names
    ]
