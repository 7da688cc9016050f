"""Everything that a page is made of, put together from result files."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from markupsafe import Markup
from pydantic import Field

from experiments.catalogue import PAPERS, Experiment, load_experiments
from experiments.verdicts import Results, Verdict, judge, unanswered
from lineage.errors import BadInput
from lineage.files import Document, read_document
from reports.audits import audits_section
from reports.benchmarks import Benchmarks, load_benchmarks
from reports.catalogue import catalogue_exhibit, experiment_numbers
from reports.examples import detail_section
from reports.exhibit import Exhibit, Section
from reports.experiment_runs import LADDER, ExperimentRuns, Origin, load_experiment_runs, seeds_of
from reports.files import Problem, Problems
from reports.ladder import ladder_exhibit
from reports.load import MARKER, Reproduction, load_reproduction
from reports.numbers import printable
from reports.reproduced import reproduction_exhibits
from reports.training import training_section
from reports.verdict_table import ClaimRow, OutcomeRow, claim_rows, outcome_rows, outcome_table, verdict_table

REPORT, SOURCES = "report", "sources.json"


class Sources(Document):
    """sources.json of a report: what beside its reproduction it was made of, by paths seen from there."""

    runs: list[str] = Field(default_factory=list)
    """Of experiments."""
    bench: str | None = None
    """Folder of benchmark results."""
    receipts: list[str] = Field(default_factory=list)
    """Of audits."""
    mixed_commits: bool = False


@dataclass(frozen=True)
class Inputs:
    """What a report is made of."""

    reproduction: Path
    runs: Sequence[Path] = ()
    """Of experiments."""
    bench: Path | None = None
    mixed_commits: bool = False
    receipts: Sequence[Path] = ()
    """Of audits."""

    @classmethod
    def of_built(cls, reproduction: Path) -> "Inputs":
        """Of the report in a reproduction. Raises IntegrityFailure where that does not say it."""
        sources = read_document(reproduction / REPORT / SOURCES, Sources)
        runs, receipts = (
            [Path(os.path.normpath(reproduction / name)) for name in names]
            for names in (sources.runs, sources.receipts)
        )
        bench = Path(os.path.normpath(reproduction / sources.bench)) if sources.bench else None
        return cls(reproduction, runs, bench, sources.mixed_commits, receipts)

    @property
    def sources(self) -> Sources:
        """All but the reproduction."""
        runs = [os.path.relpath(run, self.reproduction) for run in self.runs]
        bench = os.path.relpath(self.bench, self.reproduction) if self.bench else None
        sources = Sources(runs=runs, bench=bench, mixed_commits=self.mixed_commits)
        receipts = [os.path.relpath(path, self.reproduction) for path in self.receipts]
        return sources.model_copy(update={"receipts": receipts}) if receipts else sources

    @property
    def command(self) -> str:
        """Makes the report again, with paths as seen from above the folder of runs."""
        folders = dict.fromkeys(path.parent.name for path in self.runs)
        parts = [f"{self.reproduction.parent.name}/{self.reproduction.name}", *folders]
        if self.bench:
            bench = self.bench.resolve()
            parts += ["--bench", f"{bench.parent.name}/{bench.name}"]
        return shlex.join(["mlm-report", "build", *parts, *(["--mixed-commits"] if self.mixed_commits else [])])


@dataclass(frozen=True)
class Report:
    """A page's content."""

    reproduction: Reproduction
    exhibits: dict[str, Exhibit]
    """Those of the reproduction and the verdicts, each with a place of its own on the page."""
    catalogue: tuple[Section, ...]
    """The papers' tables and figures."""
    sections: tuple[Section, ...]
    outcomes: tuple[OutcomeRow, ...]
    claims: tuple[ClaimRow, ...]
    origins: tuple[Origin, ...]
    """The reproduction, then the runs of experiments."""
    commits: tuple[str, ...]
    """A line for each commit behind the page."""
    problems: tuple[Problem, ...]
    inputs: Inputs

    @property
    def all_exhibits(self) -> list[Exhibit]:
        """In the order of the page."""
        listed = [exhibit for section in (*self.catalogue, *self.sections) for exhibit in section.exhibits]
        return [*self.exhibits.values(), *listed]


def assemble(inputs: Inputs) -> Report:
    """Put a page together. Raises BadInput if its results are of different commits and `mixed_commits` is not set."""
    reproduction, runs = load_reproduction(inputs.reproduction), load_experiment_runs(inputs.runs)
    benchmarks = load_benchmarks(inputs.bench) if inputs.bench else None
    own = Origin(reproduction.directory, reproduction.manifest, seeds_of(reproduction.records))
    origins = (own, *runs.origins)
    commits = _commits(origins, benchmarks)
    if len(commits) > 1 and not inputs.mixed_commits:
        raise BadInput(
            f"the results are of {len(commits)} commits ({'; '.join(commits)}): make them again with one, "
            "or build with --mixed-commits, which the page then says"
        )
    experiments = load_experiments()
    verdicts = _verdicts(experiments, reproduction, runs.results)
    catalogue = _catalogue(experiments, verdicts, runs) if runs.origins or runs.problems else ()
    exhibits = reproduction_exhibits(reproduction)
    homes = {record.source: own.name for record in reproduction.records}
    claims = claim_rows(verdicts, homes | {origin.name: origin.name for origin in runs.origins})
    places = {each.name for section in catalogue for each in section.exhibits} | exhibits.keys()
    outcomes = outcome_rows(verdicts, {name: each.title for name, each in experiments.items()}, places)
    title = "What became of every published claim"
    exhibits["verdicts"] = Exhibit("verdicts", title, (), verdict_table(claims), tables=(outcome_table(outcomes),))
    sections = [training_section(reproduction), detail_section(reproduction)]
    if ladders := [origin for origin in runs.origins if origin.manifest.kind == LADDER]:
        newest = max(ladders, key=lambda origin: origin.created)
        exhibit = ladder_exhibit(newest.path, reproduction)
        sections.append(Section("ladder-section", "How loss falls with size", [exhibit]))
    sections += [benchmarks.section] if benchmarks else []
    unshown = Problems()
    if audits := audits_section(reproduction, inputs.receipts, unshown):
        sections.append(audits)
    problems = (*reproduction.problems, *runs.problems, *(benchmarks.problems if benchmarks else ()), *unshown)
    return Report(
        reproduction,
        exhibits,
        catalogue,
        tuple(sections),
        tuple(outcomes),
        tuple(claims),
        origins,
        commits,
        problems,
        inputs,
    )


def _commits(origins: Sequence[Origin], benchmarks: Benchmarks | None) -> tuple[str, ...]:
    names: dict[str, list[str]] = {}
    for origin in origins:
        names.setdefault(origin.commit, []).append(origin.name)
    for commit in benchmarks.commits if benchmarks else ():
        names.setdefault(commit, []).append("a benchmark")
    return tuple(
        f"{commit[:12] or 'no recorded commit'}: {results[0] if len(results) == 1 else f'{len(results)} results'}"
        for commit, results in names.items()
    )


def _verdicts(experiments: dict[str, Experiment], reproduction: Reproduction, results: Results) -> list[Verdict]:
    """From sealed runs alone: a reproduction that is unfinished or was changed answers nothing."""
    mine = () if reproduction.problems_of(MARKER) else reproduction.records
    records = (*results.records, *(record for record in mine if record.kind != "published"))
    verdicts = judge(experiments.values(), replace(results, records=records))
    return [*verdicts, *unanswered(experiments.values())]


def _catalogue(
    experiments: dict[str, Experiment], verdicts: Sequence[Verdict], runs: ExperimentRuns
) -> tuple[Section, ...]:
    papers: dict[str, list[Exhibit]] = {}
    for experiment in experiments.values():
        if experiment.reproduction:
            continue
        numbers = experiment_numbers(experiment, runs.results, verdicts)
        sentences = [problem.sentence for problem in runs.problems if problem.part == experiment.name]
        if not sentences and not numbers.records:
            sentences = [f"No run of {experiment.name} was given: only what is published is shown."]
        exhibit = catalogue_exhibit(numbers)
        missing = (Markup('<p class="missing">{}</p>').format(printable(sentence)) for sentence in sentences)
        exhibit = replace(exhibit, body=Markup("").join(missing))
        papers.setdefault(experiment.claims[0].paper, []).append(exhibit)
    known = {experiment.name for experiment in experiments.values()}
    stray = [problem.sentence for problem in runs.problems if problem.part not in known]
    return tuple(
        Section(f"paper-{paper}", PAPERS[paper], numbered, stray if place == 0 else ())
        for place, (paper, numbered) in enumerate(papers.items())
    )
