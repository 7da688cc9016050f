"""Verdicts on the published claims, from the records of sealed runs alone. Imports no torch."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mlm_repro.experiments.catalogue import (
    ABLATION,
    FACTS,
    NEEDS,
    PAPERS,
    Claim,
    Experiment,
    erratum_of,
    every_claim,
    group_of,
    matches,
    unanswered_claims,
)
from mlm_repro.experiments.files import EXPERIMENTS, FITTED, NOT_RUN, STAND_IN, Refusals, read_runs
from mlm_repro.lineage.digest import check_seal, is_sealed
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from mlm_repro.lineage.files import Manifest, parse_document, read_values
from mlm_repro.lineage.numbers import aligned
from mlm_repro.lineage.records import RECORDS, Kind, Record, read_records
from mlm_repro.lineage.run import MANIFEST, RunDirectory

if TYPE_CHECKING:
    from mlm_repro.experiments.scores import Finding

ORDER: tuple[Kind, ...] = ("measured", "counted", "computed", "scaled", "simulated")
"""Precedence of kinds for a claim with several numbers; within a kind the newest run counts."""
NEVER: dict[str, frozenset[Kind]] = {
    "simulate": frozenset({"measured", "counted", "scaled"}), "scaled": frozenset({"measured", "counted"})
}  # fmt: skip
"""Kinds that a run of this mode cannot have made."""

Outcome = Literal[
    "reproduced", "not-reproduced", "seen", "not-seen", "undecided", "simulated", "missed", "not-run", "consistent",
    "inconsistent", "of-others",
]  # fmt: skip
"""reproduced and not-reproduced: measured or counted, within or beyond the claim's tolerance. seen, not-seen and
undecided: an effect tried at reduced scale, forecast before it. simulated: a cost model's number, or a law's; missed:
the published number lies outside the interval of one that was not fitted to it. not-run: no number at the published
size. The others are no outcomes. consistent and inconsistent: checks, which are a document's own arithmetic and values
that were worked out of its numbers. of-others: quoted from other works."""
COLUMNS: dict[str, tuple[Outcome, ...]] = {
    "reproduced": ("reproduced",),
    "not reproduced": ("not-reproduced",),
    "at reduced scale: seen/not seen/undecided": ("seen", "not-seen", "undecided"),
    "simulated/missed": ("simulated", "missed"),
    "not run": ("not-run",),
}
"""The five outcomes as tables show them."""
CHECKS: tuple[Outcome, Outcome] = ("consistent", "inconsistent")
HELD: tuple[Outcome, Outcome] = ("reproduced", "not-reproduced")
BEYOND: tuple[Outcome, ...] = ("not-reproduced", "inconsistent")
"""Verdicts on numbers that end a command with exit code 3; an effect that is not seen at reduced scale does not."""
EFFECTS: tuple[Outcome, ...] = ("seen", "not-seen", "undecided")
Rows = dict[tuple[str, str, Kind], list[Record]]
"""An experiment's records by series, quantity and kind."""


@dataclass(frozen=True)
class Verdict:
    """A claim and what was found."""

    experiment: str
    """Empty where none runs the claim."""
    claim: Claim
    outcome: Outcome
    record: Record | None
    reason: str

    @property
    def needs(self) -> str:
        """Means that would answer a claim that was not run; empty for others."""
        return group_of(self.claim, NEEDS) or "a cluster" if self.outcome == "not-run" else ""


@dataclass(frozen=True)
class Results:
    """The records of several runs."""

    records: tuple[Record, ...]
    """Newest run first."""
    refused: dict[tuple[str, str, float | None], str]
    """Reason for which a run has no number, by (experiment, series, x)."""
    left_out: tuple[str, ...]
    """A sentence for each directory with records that was never finished."""
    findings: "dict[str, Finding]"
    """Finding of the newest ablation on a claim, by the claim's id."""


def load_results(folders: Iterable[Path]) -> Results:
    """Records of the sealed runs that stand in `folders`, or are one of them.

    Raises IntegrityFailure where a sealed file was changed, a run holds a kind of number that it cannot have made or an
    ablation's forecast is not that of its trainings, BadInput where a folder is not there.
    """
    parts: list[Numbers] = []
    left_out = []
    for path in runs_in(folders):
        if not is_sealed(path):
            left_out.append(f"{path} was never finished (it has no seal): left out")
        else:
            check_seal(path)
            parts += parts_of(path)
    records: list[Record] = []
    refused: dict[tuple[str, str, float | None], str] = {}
    findings: dict[str, Finding] = {}
    for path, manifest, own, rows in sorted(parts, key=lambda part: str(part.manifest["created"]), reverse=True):
        records += own
        mode = str(manifest["config"].get("mode", ""))
        if wrong := next((record for record in own if record.kind in NEVER.get(mode, frozenset())), None):
            raise IntegrityFailure(f"{path} is of mode {mode} and yet calls a number {wrong.kind} ({wrong.series})")
        if manifest["kind"] == ABLATION:
            from mlm_repro.experiments.forecast.ablation import derive_effects

            effects, derived = derive_effects(path)
            if [record.model_copy(update={"note": ""}) for record in own[-len(derived) :]] != derived:
                raise IntegrityFailure(f"{path} does not have the numbers of its trainings in {RECORDS}")
            findings = {finding.effect.claim: finding for finding in effects} | findings
        elif manifest["kind"] == "reproduction":
            findings = findings_of(own) | findings
        for row in parse_document({"rows": rows}, Refusals, NOT_RUN).rows:
            refused.setdefault((row.experiment, row.series, row.x), row.reason)
    return Results(tuple(records), refused, tuple(left_out), findings)


class Numbers(NamedTuple):
    """The numbers of a run, or of a run that a study keeps."""

    path: Path
    manifest: dict[str, Any]
    records: list[Record]
    """All but the published ones."""
    refused: list[Any]
    """Rows of not_run.json."""

    @property
    def name(self) -> str:
        """Name of the run."""
        return f"{self.manifest['name']}-{self.manifest['identity'][:8]}"


def runs_in(folders: Iterable[Path]) -> list[Path]:
    """Runs with records among the folders, in them, and studies of experiments inside of those.

    Raises BadInput where a folder is not there.
    """
    places = [RECORDS, f"*/{RECORDS}", f"*/{EXPERIMENTS}*/{RECORDS}"]
    runs: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise BadInput(f"{folder} is not a directory of results")
        paths = [path.parent for place in places for path in sorted(folder.glob(place))]
        runs |= dict.fromkeys(path.resolve() for path in paths if path == folder or not path.is_symlink())
    return list(runs)


def parts_of(path: Path) -> Iterator[Numbers]:
    """The numbers of a sealed run, of a study those of each run that it keeps.

    Raises IntegrityFailure for numbers of another run.
    """
    manifest = RunDirectory.open(path).manifest
    own = [record for record in read_records(path / RECORDS) if record.kind != "published"]
    if manifest["kind"] != EXPERIMENTS:
        yield Numbers(path, manifest, own, read_values(path / NOT_RUN) if (path / NOT_RUN).is_file() else [])
        return
    kept = read_runs(path)
    if strangers := {record.source for record in own} - kept.keys():
        raise IntegrityFailure(f"{path} has records of another run, {min(strangers)}")
    for name, run in kept.items():
        about = parse_document(run.manifest, Manifest, f"{MANIFEST} of {name}").model_dump(mode="json")
        yield Numbers(path, about, [record for record in own if record.source == name], run.refused or [])


def findings_of(records: Iterable[Record]) -> "dict[str, Finding]":
    """Findings of a reproduction on the order of its models, by claim."""
    from mlm_repro.experiments.scores import order_findings

    return {finding.effect.claim: finding for finding in order_findings(records)}


def judge(experiments: Iterable[Experiment], results: Results) -> list[Verdict]:
    """A verdict for every claim of the experiments."""
    records: dict[str, Rows] = defaultdict(lambda: defaultdict(list))
    for record in results.records:
        records[record.experiment][record.series, record.quantity, record.kind].append(record)
    return [_verdict(experiment, claim, records[experiment.name], results) for experiment in experiments
            for claim in experiment.claims]  # fmt: skip


def unanswered(experiments: Iterable[Experiment]) -> list[Verdict]:
    """The catalogue's claims that none of the experiments answers, each with the reason that unanswered.toml gives."""
    answered = {claim.id for experiment in experiments for claim in experiment.claims}
    verdicts = []
    for claim in every_claim():
        if claim.id not in answered:
            rows = (row for rows in (unanswered_claims().context, unanswered_claims().missing) for row in rows)
            row = next((row for row in rows if matches(claim, row.claims)), None)
            outcome: Outcome = "of-others" if row in unanswered_claims().context else "not-run"
            verdicts.append(Verdict("", claim, outcome, None, row.reason if row else "no experiment runs it"))
    return verdicts


def named(outcome: str) -> str:
    """An outcome in words."""
    return outcome.replace("-", " ")


def count_by_paper(verdicts: Sequence[Verdict]) -> dict[str, list[str]]:
    """Cells of `COLUMNS` by paper's title, then of "all"; empty where there is nothing."""
    counts = Counter((verdict.claim.paper, verdict.outcome) for verdict in verdicts)
    counts.update(("all", verdict.outcome) for verdict in verdicts)
    rows = {}
    for paper in dict.fromkeys((*(verdict.claim.paper for verdict in verdicts), "all")):
        cells = [[counts[paper, outcome] for outcome in outcomes] for outcomes in COLUMNS.values()]
        if any(map(any, cells)):
            rows[PAPERS.get(paper, paper)] = ["/".join(map(str, each)) if any(each) else "" for each in cells]
    return rows


def format_summary(verdicts: Sequence[Verdict]) -> str:
    """The five outcomes by paper and in all, then what stands behind them and apart from them."""
    rows = count_by_paper(verdicts)
    width = max(map(len, rows))
    lines = [f"{'paper':<{width}}  {'  '.join(COLUMNS)}"]
    for title, row in rows.items():
        cells = (f"{cell:>{len(name)}}" for cell, name in zip(row, COLUMNS, strict=True))
        lines.append(f"{title:<{width}}  {'  '.join(cells)}")
    return "\n".join([*lines, "", *headlines(verdicts)])


def headlines(verdicts: Sequence[Verdict]) -> list[str]:
    """Sentences on what the counts of claims hide."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    held = [verdict.claim for verdict in verdicts if verdict.outcome == "reproduced"]
    behind = {group_of(claim, FACTS) or claim.citation for claim in held}
    said = [f"Behind {counts['reproduced']} reproduced rows stand {len(behind)} independent facts."]
    fitted = sum(each.record.note == FITTED for each in verdicts if each.record and each.outcome == "simulated")
    if held_out := counts["simulated"] + counts["missed"] - fitted:
        inside = counts["simulated"] - fitted
        said.append(
            f"Of {fitted + held_out} simulated rows {fitted} were fitted on themselves and {held_out} were held out: "
            f"{inside} published numbers ({inside / held_out:.0%}) lie inside the interval, which says 90 %."
        )
    needs = Counter(verdict.needs for verdict in verdicts if verdict.needs)
    if needs:
        curves = Counter(each.claim.citation for each in verdicts if each.needs and each.claim.x is not None)
        points = sum(number for number in curves.values() if number > 2)
        figures = sum(number > 2 for number in curves.values())
        means = "; ".join(f"{need}: {needs[need]}" for need in NEEDS if needs[need])
        said.append(
            f"Of {needs.total()} rows that were not run {points} are points of {figures} figures. They need {means}."
        )
    good, bad, others = (counts[outcome] for outcome in (*CHECKS, "of-others"))
    said.append(
        f"Apart stand {good + bad} checks of a document's own arithmetic ({bad} of them inconsistent) and {others} "
        "numbers of others."
    )
    return said


def format_verdicts(verdicts: Sequence[Verdict]) -> str:
    """The table: claim, published value, ours, its kind, verdict, reason; then how many there are of each."""
    rows = [("claim", "published", "ours", "kind", "verdict", "reason"), *(_cells(verdict) for verdict in verdicts)]
    return "\n".join([*aligned(rows), "", f"{len(verdicts)} claims: {count_outcomes(verdicts)}"])


def count_outcomes(verdicts: Iterable[Verdict]) -> str:
    """How many verdicts there are of each kind, the commonest first."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    return ", ".join(f"{number} {named(outcome)}" for outcome, number in counts.most_common()) or "no claims"


def _verdict(experiment: Experiment, claim: Claim, records: Rows, results: Results) -> Verdict:
    record = _find(experiment, claim, records)
    if (record is None or record.kind == "scaled") and (finding := results.findings.get(claim.id)):
        number = finding.record if finding.is_number else None
        return Verdict(experiment.name, claim, finding.outcome, number, finding.sentence)
    if record is None:
        return Verdict(experiment.name, claim, "not-run", None, _reason(experiment, claim, results, bool(records)))
    deviation = record.value - float(claim.value)
    shown = f"{100 * deviation / float(claim.value) + 0.0:+.1f} %" if claim.value else f"{deviation:+.3g}"  # not -0.0
    if record.kind == "scaled":
        smaller = "the number is of a smaller model or machine"
        reason = f"the number is of {STAND_IN}" if record.note.startswith(STAND_IN) else smaller
        return Verdict(experiment.name, claim, "not-run", record, reason)
    if record.kind == "simulated":
        outcome: Outcome = "simulated"
        if record.low is not None and record.high is not None:
            is_inside = record.low <= claim.value <= record.high
            shown += f"; published lies {'inside' if is_inside else 'outside'} {record.low:.4g} to {record.high:.4g}"
            outcome = "simulated" if is_inside or record.note == FITTED else "missed"
        return Verdict(experiment.name, claim, outcome, record, f"{shown}; {record.note}" if record.note else shown)
    good = claim.agrees(record.value)
    said = {"digits": "the printed digits"}.get(claim.tolerance, f"{claim.tolerance} ({claim.because})")
    asked = "" if claim.relation == "=" else f", the claim says {claim.relation}"
    is_check = record.kind == "computed" or claim.confidence == "derived"
    erratum = None if good else erratum_of(claim)
    said += f"; an erratum: {erratum.follows}" if erratum else ""
    reason = f"{shown}{asked}, {'within' if good else 'beyond'} {said}"
    return Verdict(experiment.name, claim, (CHECKS if is_check else HELD)[not good], record, reason)


def _find(experiment: Experiment, claim: Claim, records: Rows) -> Record | None:
    """The record that speaks for the claim. A twin's x is taken as the same share of its training."""
    mine = (claim.series, claim.quantity)
    curve = [each.x for each in experiment.claims if (each.series, each.quantity) == mine and each.x is not None]
    for kind in ORDER:
        of_kind = records.get((*mine, kind), [])
        stretch = 1.0
        if kind == "scaled" and experiment.reproduction and claim.x is not None:
            stretch = max((each.x for each in of_kind if each.x is not None), default=1.0) / max(curve)
        for record in of_kind:
            if (record.x is None) == (claim.x is None) and math.isclose(record.x or 0, (claim.x or 0) * stretch):
                return record
    return None


def _reason(experiment: Experiment, claim: Claim, results: Results, was_run: bool) -> str:
    if reason := results.refused.get((experiment.name, claim.series, claim.x)):
        return reason
    if was_run or not experiment.produces(claim.quantity):
        return experiment.not_run or "the run found here has no number for it"
    if experiment.reproduction:
        return f"no run was found; `mlm-experiment reproduce {experiment.reproduction}` makes one"
    verb = f"ablate {experiment.name} --dataset DIR" if experiment.ablation else f"run {experiment.name}"
    return f"no run was found; `mlm-experiment {verb}` makes one"


def _cells(verdict: Verdict) -> tuple[str, ...]:
    """The table's row. A number of a smaller model or machine is not shown beside the claim's value."""
    record = verdict.record
    ours, kind = "", record.kind if record else ""
    if record:
        rounded = f"{record.value:.0f}" if record.value == round(record.value) else f"{record.value:.4g}"
        ours = "—" if kind == "scaled" else rounded
    return verdict.claim.id, verdict.claim.published, ours, kind, named(verdict.outcome), verdict.reason
