"""Verdicts on the published claims, from the records of sealed runs alone. Imports no torch."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from experiments.catalogue import ABLATION, PAPERS, Claim, Experiment, every_claim, unanswered_claims
from experiments.files import FITTED, HELD_OUT, NOT_RUN, STAND_IN, Refusals
from lineage.digest import check_seal, is_sealed
from lineage.errors import BadInput, IntegrityFailure
from lineage.files import parse_document, read_values
from lineage.records import RECORDS, Kind, Record, read_records
from lineage.run import MANIFEST, RunDirectory

if TYPE_CHECKING:
    from experiments.scores import Finding

ORDER: tuple[Kind, ...] = ("measured", "computed", "scaled", "simulated")
"""Precedence of kinds for a claim with several numbers; within a kind the newest run counts."""
NEVER: dict[str, frozenset[Kind]] = {"simulate": frozenset({"measured", "scaled"}), "scaled": frozenset({"measured"})}
"""Kinds that a run of this mode cannot have made."""

Outcome = Literal[
    "REPRODUCED", "DIVERGED", "SUPPORTED", "CONTRADICTED", "INCONCLUSIVE", "CONSISTENT", "INCONSISTENT", "SIMULATED",
    "NOT_RUN", "CONTEXT",
]  # fmt: skip
"""REPRODUCED and DIVERGED: measured, within or beyond the claim's tolerance. SUPPORTED, CONTRADICTED and INCONCLUSIVE:
an effect tried at reduced scale, forecast before it. CONSISTENT and INCONSISTENT: the source's own arithmetic.
SIMULATED: a cost model's number. NOT_RUN: no number at the published size. CONTEXT: others' numbers."""
HELD: dict[Kind, tuple[Outcome, Outcome]] = {
    "measured": ("REPRODUCED", "DIVERGED"), "computed": ("CONSISTENT", "INCONSISTENT")
}  # fmt: skip
"""Verdicts of kinds that are held against a claim: within its tolerance, and beyond it."""
BEYOND: tuple[Outcome, ...] = ("DIVERGED", "INCONSISTENT")
"""Verdicts on numbers that end a command with exit code 3; an effect that is CONTRADICTED at reduced scale does not."""
EFFECTS: tuple[Outcome, ...] = ("SUPPORTED", "CONTRADICTED", "INCONCLUSIVE")


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
    runs: dict[Path, str] = {}
    left_out = []
    for path in _directories(folders):
        if not is_sealed(path):
            left_out.append(f"{path} was never finished (it has no seal): left out")
        else:
            check_seal(path)
            runs[path] = str(RunDirectory.open(path).manifest.get("created", ""))
    records: list[Record] = []
    refused: dict[tuple[str, str, float | None], str] = {}
    findings: dict[str, Finding] = {}
    for path in sorted(runs, key=lambda run: runs[run], reverse=True):
        records += (own := _records(path))
        kind = RunDirectory.open(path).manifest["kind"]
        if kind == ABLATION:
            from experiments.forecast.ablation import derive_effects

            effects, derived = derive_effects(path)
            if records[-len(derived) :] != derived:
                raise IntegrityFailure(f"{path} does not have the numbers of its trainings in {RECORDS}")
            findings = {finding.effect.claim: finding for finding in effects} | findings
        elif kind == "reproduction":
            from experiments.reproduce.order import order_findings

            findings = {each.effect.claim: each for each in order_findings(own)} | findings
        if (path / NOT_RUN).is_file():
            for row in parse_document({"rows": read_values(path / NOT_RUN)}, Refusals, NOT_RUN).rows:
                refused.setdefault((row.experiment, row.series, row.x), row.reason)
    return Results(tuple(records), refused, tuple(left_out), findings)


def judge(experiments: Iterable[Experiment], results: Results) -> list[Verdict]:
    """A verdict for every claim of the experiments."""
    records: dict[str, Rows] = defaultdict(lambda: defaultdict(list))
    for record in results.records:
        records[record.experiment][record.series, record.quantity, record.kind].append(record)
    return [
        _verdict(experiment, claim, records[experiment.name], results)
        for experiment in experiments
        for claim in experiment.claims
    ]


def unanswered(experiments: Iterable[Experiment]) -> list[Verdict]:
    """The catalogue's claims that none of the experiments answers, each with the reason that unanswered.toml gives."""
    answered = {claim.id for experiment in experiments for claim in experiment.claims}
    verdicts = []
    for claim in every_claim():
        if claim.id not in answered:
            is_context, reason = unanswered_claims().reason(claim) or (False, "no experiment runs it")
            verdicts.append(Verdict("", claim, "CONTEXT" if is_context else "NOT_RUN", None, reason))
    return verdicts


def format_summary(verdicts: Sequence[Verdict]) -> str:
    """The number of claims and of each verdict, by paper and in all; of some verdicts even where there are none."""
    counts = Counter((verdict.claim.paper, verdict.outcome) for verdict in verdicts)
    given = {*HELD["measured"], *EFFECTS, *(verdict.outcome for verdict in verdicts)}
    outcomes = [outcome for outcome in get_args(Outcome) if outcome in given]
    papers = dict.fromkeys(verdict.claim.paper for verdict in verdicts)
    rows = {PAPERS[paper]: [counts[paper, outcome] for outcome in outcomes] for paper in papers}
    rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    names = (*outcomes, "claims")
    width = max(map(len, rows))
    lines = [f"{'paper':<{width}}  {'  '.join(names)}"]
    for title, row in rows.items():
        cells = (f"{n or '':>{len(name)}}" for n, name in zip((*row, sum(row)), names, strict=True))
        lines.append(f"{title:<{width}}  {'  '.join(cells)}")
    return "\n".join(lines)


def format_verdicts(verdicts: Sequence[Verdict]) -> str:
    """The table: claim, published value, ours, its kind, verdict, reason; then how many there are of each."""
    rows = [("claim", "published", "ours", "kind", "verdict", "reason"), *(_cells(verdict) for verdict in verdicts)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join(map(str.ljust, row, (*widths, 0))).rstrip() for row in rows]
    return "\n".join([*lines, "", f"{len(verdicts)} claims: {count_outcomes(verdicts)}"])


def count_outcomes(verdicts: Iterable[Verdict]) -> str:
    """How many verdicts there are of each kind, the commonest first."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common()) or "no claims"


def _directories(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        if not folder.is_dir():
            raise BadInput(f"{folder} is not a directory of results")
        for path in (folder, *sorted(folder.iterdir())):
            if not path.is_symlink() and (path / RECORDS).is_file():
                yield path.resolve()


def _records(path: Path) -> list[Record]:
    if not (path / MANIFEST).is_file():
        raise IntegrityFailure(f"{path} holds records but no {MANIFEST}: nothing says what made them")
    mode = str(RunDirectory.open(path).manifest["config"].get("mode", ""))
    records = [record for record in read_records(path / RECORDS) if record.kind != "published"]
    for record in records:
        if record.kind in NEVER.get(mode, frozenset()):
            raise IntegrityFailure(f"{path} is of mode {mode} and yet calls a number {record.kind} ({record.series})")
    return records


def _verdict(experiment: Experiment, claim: Claim, records: Rows, results: Results) -> Verdict:
    record = _find(experiment, claim, records)
    if (record is None or record.kind == "scaled") and (finding := results.findings.get(claim.id)):
        return Verdict(experiment.name, claim, finding.outcome, finding.record, finding.sentence)
    if record is None:
        return Verdict(experiment.name, claim, "NOT_RUN", None, _reason(experiment, claim, results, bool(records)))
    deviation = record.value - float(claim.value)
    shown = f"{100 * deviation / float(claim.value) + 0.0:+.1f} %" if claim.value else f"{deviation:+.3g}"  # not -0.0
    if record.kind == "scaled":
        smaller = "the number is of a smaller model or machine"
        reason = f"the number is of {STAND_IN}" if record.note.startswith(STAND_IN) else smaller
        return Verdict(experiment.name, claim, "NOT_RUN", record, reason)
    if record.kind == "simulated":
        if record.low is not None and record.high is not None:
            side = "inside" if record.low <= claim.value <= record.high else "outside"
            shown += f"; published lies {side} {record.low:.4g} to {record.high:.4g}"
        shown += f"; {record.note}" if record.note in (FITTED, HELD_OUT) else ""
        return Verdict(experiment.name, claim, "SIMULATED", record, shown)
    good = claim.agrees(record.value)
    said = {"digits": "the printed digits"}.get(claim.tolerance, f"{claim.tolerance} ({claim.because})")
    asked = "" if claim.relation == "=" else f", the claim says {claim.relation}"
    return Verdict(
        experiment.name, claim, HELD[record.kind][not good], record,
        f"{shown}{asked}, {'within' if good else 'beyond'} {said}",
    )  # fmt: skip


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
    return verdict.claim.id, verdict.claim.published, ours, kind, verdict.outcome, verdict.reason
