"""The content of a page, assembled from result files."""

import os
import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from pydantic import Field

from mlm_repro.experiments.catalogue import Experiment, load_experiments
from mlm_repro.experiments.files import VERDICTS, VerdictScore
from mlm_repro.experiments.scores import EXPERIMENT
from mlm_repro.experiments.verdicts import headlines, judge, unanswered
from mlm_repro.experiments.worked_out import worked_out
from mlm_repro.lineage.errors import Fault
from mlm_repro.lineage.files import FileSchema, read_document
from mlm_repro.lineage.records import Record
from mlm_repro.reports.catalogue import ExperimentNumbers, catalogue_exhibit
from mlm_repro.reports.claims import (
    Claims,
    Group,
    Paper,
    errata_exhibit,
    forecast_of_order,
    group_claims,
    paper_parts,
    verdicts_exhibit,
)
from mlm_repro.reports.engines import engines_exhibit
from mlm_repro.reports.exhibit import Exhibit
from mlm_repro.reports.experiment_runs import (
    AGAINST,
    Origin,
    load_experiment_runs,
)
from mlm_repro.reports.load import Reproduction, load_reproduction
from mlm_repro.reports.reproduced import order_of, reproduction_exhibits

REPORT = "report"
SOURCES = "sources.json"


class Sources(FileSchema):
    """sources.json of a report, written into its folder: the report's inputs besides the
    reproduction, by paths relative to the reproduction's directory, wherever the report lies."""

    runs: list[str] = Field(default_factory=list)
    """Relative paths of the runs of experiments and engines, and of a reproduction that is kept
    with the code."""


@dataclass(frozen=True)
class Inputs:
    """Directories that a report is made of: one of a reproduction, and the ones of runs that the
    page shows beside it."""

    reproduction: Path
    runs: Sequence[Path] = ()
    """Directories of runs of experiments and engines, and of a reproduction that is kept with the
    code."""

    @classmethod
    def of_built(cls, reproduction: Path) -> "Inputs":
        """Return the Inputs of the report that was built in the directory `reproduction`, as the
        report's sources.json names them. Raises IntegrityFailure if sources.json is damaged or
        missing."""
        sources = read_document(reproduction / REPORT / SOURCES, Sources)
        return cls(
            reproduction, [Path(os.path.normpath(reproduction / name)) for name in sources.runs]
        )

    @property
    def sources(self) -> Sources:
        """Content, a Sources, of the report's file sources.json, wherever the report lies: the
        paths of the attribute `runs` relative to `reproduction`, in the same order. Nothing is
        written here; the caller does that."""
        return Sources(runs=[os.path.relpath(path, self.reproduction) for path in self.runs])

    @property
    def command(self) -> str:
        """Command line `mlm-report build` as one text, quoted for a shell, that builds the report
        again from the reproduction and the folders of the other runs, each once. Its paths are
        relative to the folder that holds the folder of runs, so the command must be given there."""
        above = self.reproduction.parent.parent
        folders = dict.fromkeys(os.path.relpath(path.parent, above) for path in self.runs)
        return shlex.join(
            ["mlm-report", "build", str(self.reproduction.relative_to(above)), *folders]
        )


@dataclass(frozen=True)
class Report:
    """Everything that one page shows: a `reproduction`, and `exhibits` of it and of the verdicts;
    all `claims`, and `papers`, sections with the same claims by paper; `sections`, each of one more
    exhibit; and `origins`, the runs behind the numbers. The function `assemble` makes it from
    `inputs`."""

    reproduction: Reproduction
    exhibits: dict[str, Exhibit]
    """Exhibits of the reproduction and the verdicts, by name, whose positions on the page are
    fixed."""
    claims: Claims
    papers: Sequence[Paper]
    sections: Mapping[str, Exhibit]
    """Title of a section → the one exhibit that it shows."""
    origins: tuple[Origin, ...]
    """Origins of the reproduction, then of the other runs that have numbers on the page."""
    left_out: tuple[str, ...]
    """Sentences, one for each run that was never finished and is not shown."""
    inputs: Inputs
    kept: Reproduction | None
    """The reproduction that is kept with the code, if the page shows another one; else None."""

    @property
    def all_exhibits(self) -> list[Exhibit]:
        """List of every exhibit that the page shows, in its order."""
        parts = chain.from_iterable(paper.parts for paper in self.papers)
        drawn = [part.exhibit for part in parts if part.exhibit]
        return [*self.exhibits.values(), *drawn, *self.sections.values()]

    @property
    def groups(self) -> list[Group]:
        """List of the Groups of claims, the page's sections in its order. A Group has the claims of
        one scale or, if they have no scale, of one outcome. Empty Groups are left out, except the
        first, of measured claims."""
        return group_claims(self.claims)

    @property
    def headlines(self) -> list[str]:
        """List of sentences that explain the counts of outcomes: the meaning of an outcome, how
        good the predictions are, claims that were not tried. The last sentences, one for each
        verdicts.json that lies beside the runs' directories, say how many verdicts could have
        failed; these files are read at each access, and none need be there. Raises IntegrityFailure
        if one is damaged."""
        beside = dict.fromkeys(path.parent / VERDICTS for path in self.inputs.runs)
        scores = [read_document(path, VerdictScore).sentence for path in beside if path.is_file()]
        return [*headlines(self.claims), *scores]

    @property
    def findings(self) -> list[tuple[str, str, str]]:
        """List of the findings in short, each a triple of texts: the id of the element of the page
        that the finding links to, the finding's name and a sentence. First comes the order of the
        sizes in the reproduction; then, if there are such, that order in `kept`, the reproduction
        kept with the code, and in other runs with a sealed forecast; last, for each of `sections`,
        its title and the first text of its exhibit's caption."""
        short = [("reproduction", "This run", order_of(self.reproduction))]
        if self.kept:
            place = f"run-{Origin.of(self.kept).name}"
            short.append((place, "Kept with the code", order_of(self.kept)))
        if sealed := forecast_of_order(self.claims):
            short.append((EXPERIMENT.replace("/", "-"), "The same with a forecast", sealed))
        return short + [
            (f"{exhibit.name}-section", title, exhibit.caption[0])
            for title, exhibit in self.sections.items()
        ]

    @property
    def homes(self) -> dict[str, str]:
        """Dict from a source that a record names to the name that the page gives the run behind
        this source; every source of the reproduction leads to the reproduction's name."""
        own, *others = (origin.name for origin in self.origins)
        return {record.source: own for record in self.reproduction.records} | {
            name: name for name in others
        }


def assemble(inputs: Inputs) -> Report:
    """Read a report's inputs, judge the claims by them and by computed and simulated numbers, and
    return the Report, the content of its page. Nothing is drawn or written. Raises Fault if two
    exhibits have one name, and BadInput or IntegrityFailure as `load_reproduction` and
    `load_experiment_runs` do."""
    reproduction = load_reproduction(inputs.reproduction)
    results, run_origins = load_experiment_runs(inputs.runs)
    origins = (Origin.of(reproduction), *run_origins)
    experiments = load_experiments()
    records = (
        *results.records,
        *(record for record in reproduction.records if record.kind != "published"),
    )
    verdicts = judge(experiments.values(), replace(results, records=records))
    worked = []
    for experiment in experiments.values():
        worked += [number.record for number in worked_out(experiment).numbers]
    # A run's computed numbers are the same, or an earlier version's.
    known = set(map(_position, worked))
    claims = Claims.of([*verdicts, *unanswered(experiments.values())])
    exhibits = reproduction_exhibits(reproduction)
    beside = [record for record in results.records if _position(record) not in known]
    drawn = _drawn(experiments, claims, (*worked, *beside))
    papers = paper_parts(claims, experiments, drawn, exhibits)
    sections = {}
    by_kind = defaultdict(list)
    for origin in sorted(run_origins, key=lambda origin: origin.manifest.created):
        by_kind[origin.manifest.kind].append(origin.path)
    if AGAINST in by_kind:
        sections["Beside other engines"] = engines_exhibit(*by_kind[AGAINST])
    sections["Errata found in the papers"] = errata_exhibit(claims)
    kept_one = load_reproduction(by_kind["reproduction"][-1]) if "reproduction" in by_kind else None
    report = Report(
        reproduction,
        exhibits,
        claims,
        papers,
        sections,
        origins,
        results.left_out,
        inputs,
        kept_one,
    )
    exhibits["verdicts"] = verdicts_exhibit(claims, report.homes)
    names = Counter(exhibit.name for exhibit in report.all_exhibits)
    if twice := [name for name, count in names.items() if count > 1]:
        raise Fault(
            f"two exhibits of the page have the name {twice[0]}, and the files of one would replace"
            " the other's, so that no page was written: please report it"
        )
    return report


def _position(record: Record) -> tuple[str, str, str, str, float | None]:
    return record.experiment, record.series, record.quantity, record.kind, record.x


def _drawn(
    experiments: Mapping[str, Experiment], claims: Claims, every: Sequence[Record]
) -> dict[str, Exhibit]:
    """Return a dict experiment's name → Exhibit, made of the experiment's records in `every` and of
    its verdicts in `claims`; an exhibit without records says so. Experiments that a reproduction
    answers are left out."""
    by_experiment = claims.by("experiment")
    drawn = {}
    for name, experiment in experiments.items():
        if experiment.reproduction:
            continue
        records = [record for record in every if record.experiment == name]
        numbers = ExperimentNumbers(experiment, records, by_experiment.get(name, ()))
        missing = "" if records else f"No run of {name} was given: only what is published is shown."
        drawn[name] = replace(catalogue_exhibit(numbers), missing=missing)
    return drawn
