"""Verdicts on the published claims, from the records of sealed runs alone. Imports no torch."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Literal, NamedTuple

from mlm_repro.experiments.benchmark import Table
from mlm_repro.experiments.catalogue import (
    ABLATION,
    DIGITS,
    FACTS,
    NEEDS,
    PAPERS,
    UNANSWERED,
    Claim,
    Experiment,
    erratum_of,
    every_claim,
    group_of,
    matches,
)
from mlm_repro.experiments.files import EXPERIMENTS, FITTED, PARTIAL, STAND_IN, read_runs
from mlm_repro.experiments.ranges import Range, as_range
from mlm_repro.experiments.worked_out import Worked, WorkedOut, worked_out
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.digest import check_seal, is_sealed
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from mlm_repro.lineage.files import Manifest, parse_document
from mlm_repro.lineage.numbers import aligned
from mlm_repro.lineage.records import RECORDS, Kind, Record, read_records
from mlm_repro.lineage.run import MANIFEST, RunDirectory

if TYPE_CHECKING:
    from mlm_repro.experiments.scores import Finding

ORDER: tuple[Kind, ...] = ("measured", "counted", "computed", "simulated", "scaled")
"""Precedence of kinds for a claim with several numbers; within a kind what is worked out, then the
newest run."""
NEVER = {"simulate": ("measured", "counted", "scaled"), "scaled": ("measured", "counted")}
"""Kinds of numbers that a run cannot have made, by the run's mode."""

Outcome = Literal[
    "confirmed",
    "contradicted",
    "predicted",
    "missed",
    "undecided",
    "fitted",
    "not-tried",
    "of-others",
]
"""confirmed and contradicted: our number has the relation to the claim that its sentence states, or
does not, whatever rounding and the tolerance leave open. predicted and missed: the published number
lies inside or outside the interval of a prediction that no fit has seen. Without a verdict:
undecided, an effect that the trainings cannot tell; fitted, a number that a fit has seen;
not-tried; of-others, quoted from other works."""
Scale = Literal["same", "reduced", "simulated", "arithmetic", ""]
SCALES: dict[Scale, str] = {
    "same": "measured or counted as published",
    "reduced": "small models over several seeds, which say nothing final of the published size",
    "simulated": "by a cost model that has not seen it",
    "arithmetic": "from the documents' own numbers",
}
"""Ways in which a claim can be tried, each with its meaning in words."""
COST_MODEL = "the cost model"
WORDS: tuple[Outcome, ...] = ("confirmed", "contradicted", "predicted", "not-tried")
"""The outcomes that tables count; predicted is counted out of all predictions."""
EXHIBIT = re.compile(r"(.* )?([Tt]able|Figure|curve).*")
Rows = dict[tuple[str, str, Kind], list[Record]]
"""An experiment's records, lists by series, quantity and kind."""


@dataclass(frozen=True)
class Verdict:
    """A published claim, the outcome of checking it here with the reason in words, the way in which
    it was tried, `scale`, and the Record of the number that was compared with it, or None."""

    experiment: str
    """Name of the experiment that answers the claim; empty if none does."""
    claim: Claim
    outcome: Outcome
    scale: Scale
    """Way in which the claim was tried, a key of `SCALES`; empty if it was not tried."""
    record: Record | None
    """The number that was compared with the claim; None if there is none, or if it means
    nothing."""
    reason: str
    """Reason for the outcome, in words."""
    baselines: Mapping[str, Range] = field(default_factory=dict)
    """Predictions by simpler rules, by the rule's name; empty unless the number is simulated."""
    beside: tuple[Record, ...] = field(default=(), compare=False)
    """The other records with the claim's series, quantity and x. Of a kind in which such a number
    was worked out, only the numbers that were worked out are kept."""

    @property
    def needs(self) -> str:
        """Equipment that a try of the claim would take, such as "a cluster", if it was not tried;
        else empty."""
        return group_of(self.claim, NEEDS) or "a cluster" if self.outcome == "not-tried" else ""

    @property
    def fact(self) -> str:
        """A text that is equal for verdicts that hold or fail together, because they are about one
        workload, one sentence or one exhibit, or because `FACTS` groups them."""
        if self.scale == "simulated" and self.record:
            return str(self.record.digest)
        return (
            (self.scale and group_of(self.claim, FACTS))
            or self.claim.sentence
            or self.claim.citation
        )

    @property
    def is_against(self) -> bool:
        """True for a verdict whose outcome is "contradicted" and whose scale is not "reduced"; a
        missed prediction is not against its claim."""
        return self.outcome == "contradicted" and self.scale != "reduced"


@dataclass(frozen=True)
class Results:
    """Records of several runs, the newest run's first, without published records; sentences on the
    runs that were left out because they are not finished; and a dict claim's id → Finding of the
    newest ablation on it."""

    records: tuple[Record, ...]
    """All but the published ones, of the newest run first."""
    left_out: tuple[str, ...]
    """A sentence for each directory with records that was never finished."""
    findings: "dict[str, Finding]"
    """Finding of the newest ablation on a claim, by the claim's id."""


def load_results(folders: Iterable[Path]) -> Results:
    """Return the Results of the sealed runs that are in `folders`, or are one of them: their
    records, newest run first, a sentence for each unfinished run, and the ablations' findings.

    Raises IntegrityFailure if a sealed file was changed, a run has a kind of number that it cannot
    have made, or an ablation's records or forecast disagree with its trainings; BadInput if a
    folder does not exist.
    """
    parts: list[RunNumbers] = []
    left_out = []
    for path in runs_in(folders):
        if not is_sealed(path):
            left_out.append(f"{path} was never finished (it has no seal): left out")
        else:
            check_seal(path)
            parts += parts_of(path)
    records = []
    findings: dict[str, Finding] = {}
    for path, manifest, own in sorted(
        parts, key=lambda part: str(part.manifest["created"]), reverse=True
    ):
        records += own
        mode = str(manifest["config"].get("mode", ""))
        for record in own:
            if record.kind in NEVER.get(mode, ()):
                raise IntegrityFailure(
                    f"{path} was made in mode {mode}, which gives no {record.kind} numbers, and has"
                    f" one in {RECORDS} ({record.series}): it was changed, so run the experiment"
                    " again"
                )
        if manifest["kind"] == ABLATION:
            from mlm_repro.experiments.forecast.ablation import derive_effects

            effects, derived = derive_effects(path)
            if [
                record.model_copy(update={"note": ""}) for record in own[-len(derived) :]
            ] != derived:
                raise IntegrityFailure(
                    f"{path} does not have in {RECORDS} the numbers that its kept trainings give:"
                    " restore the run, or move it away"
                )
            findings = {finding.effect.claim: finding for finding in effects} | findings
    return Results(tuple(records), tuple(left_out), findings)


class RunNumbers(NamedTuple):
    """A sealed run, or one of the runs that a study keeps: its manifest as a dict, and its records
    as a list without the published ones. `path` is the directory of the run itself or of the study;
    the property `name` is the name of the run's own directory in both cases."""

    path: Path
    manifest: JSON
    records: list[Record]
    """All records of the run but the published ones."""

    @property
    def name(self) -> str:
        """The name of the run's directory: the manifest's name, a hyphen and the first eight digits
        of its identity."""
        return f"{self.manifest['name']}-{self.manifest['identity'][:8]}"


def runs_in(folders: Iterable[Path]) -> list[Path]:
    """Return a list of the directories with a file of records, resolved and each once: the folders
    themselves, runs inside the folders, and runs named `experiment*` inside directories of the
    folders. A run that is itself a link is left out, unless it is one of the folders.

    Raises BadInput if a folder does not exist.
    """
    places = [RECORDS, f"*/{RECORDS}", f"*/experiment*/{RECORDS}"]
    runs = []
    for folder in folders:
        if not folder.is_dir():
            raise BadInput(f"{folder} is not a directory: --results takes folders of runs")
        for place in places:
            paths = [path.parent for path in sorted(folder.glob(place))]
            runs += [path.resolve() for path in paths if path == folder or not path.is_symlink()]
    return list(dict.fromkeys(runs))


def parts_of(path: Path) -> Iterator[RunNumbers]:
    """Yield a RunNumbers, manifest and records, for the run in a sealed directory or, if it is a
    study, for each run that the study keeps; published records are left out.

    Raises BadInput if there is no run, or if its records are missing or have a line that is no
    record; IntegrityFailure if a manifest or the study's list of runs is damaged, or if a record
    belongs to a run that the study does not keep.
    """
    manifest = RunDirectory.open(path).manifest
    own = [record for record in read_records(path / RECORDS) if record.kind != "published"]
    if manifest["kind"] != EXPERIMENTS:
        yield RunNumbers(path, manifest, own)
        return
    lines = read_runs(path)
    if strangers := {record.source for record in own} - lines.keys():
        raise IntegrityFailure(
            f"{path} was changed, so restore the study's files: it has records of a run that its"
            f" runs.jsonl does not keep, {min(strangers)}"
        )
    for name, run in lines.items():
        about = parse_document(run.manifest, Manifest, f"{MANIFEST} of {name}").model_dump(
            mode="json"
        )
        yield RunNumbers(path, about, [record for record in own if record.source == name])


def judge(
    experiments: Iterable[Experiment],
    results: Results,
    work: Callable[[Experiment], WorkedOut] = worked_out,
) -> list[Verdict]:
    """Return a list with a Verdict for every claim of the experiments, in the experiments' and the
    claims' order. If a claim has several numbers, `ORDER` says which kind of number answers it. A
    claim without a number, or with only a number of a smaller model or machine, is answered by an
    ablation's finding, if `results` has one on it.

    The numbers come from the runs in `results` and from `work`, a function that is given an
    experiment and returns the numbers that are computed and simulated for it.
    """
    records: dict[str, Rows] = defaultdict(lambda: defaultdict(list))
    verdicts = []
    every = [(experiment, work(experiment)) for experiment in experiments]
    numbers = chain.from_iterable(worked.numbers for _, worked in every)
    for record in (*(each.record for each in numbers), *results.records):
        records[record.experiment][record.series, record.quantity, record.kind].append(record)
    for experiment, worked in every:
        refused = {(each["series"], each["x"]): str(each["reason"]) for each in worked.refused}
        known = {id(each.record): each for each in worked.numbers}
        for claim in experiment.claims:
            at = _find(experiment, claim, records[experiment.name])
            ours = at[0] if at else None
            verdict = _verdict(experiment, claim, ours, known.get(id(ours)), results)
            worked_kinds = {record.kind for record in at if id(record) in known}
            others = (each for each in at if id(each) in known or each.kind not in worked_kinds)
            beside = tuple(each for each in others if each is not verdict.record)
            reason = verdict.reason
            if verdict.outcome == "not-tried":
                reason = refused.get((claim.series, claim.x), reason)
            verdicts.append(replace(verdict, beside=beside, reason=reason))
    return verdicts


def unanswered(experiments: Iterable[Experiment]) -> list[Verdict]:
    """Return a list of Verdicts without a number, one for each published claim that no experiment
    in `experiments` answers, in the order of `every_claim`. A Verdict's reason is the one in
    unanswered.toml, or else that no experiment runs the claim. Its outcome is of-others for a claim
    that unanswered.toml lists under `context`, because the number is of others, and else
    not-tried."""
    answered = set().union(*(experiment.expected.claims for experiment in experiments))
    rows = [*UNANSWERED["context"], *UNANSWERED["missing"]]
    rows.append({"claims": ["*"], "reason": "no experiment runs it"})
    verdicts = []
    for claim in every_claim():
        if not matches(claim, answered):
            row = next(row for row in rows if matches(claim, row["claims"]))
            outcome: Outcome = "of-others" if row in UNANSWERED["context"] else "not-tried"
            verdicts.append(Verdict("", claim, outcome, "", None, row["reason"]))
    return verdicts


def named(outcome: str) -> str:
    """Return an outcome such as `not-tried` with spaces instead of hyphens."""
    return outcome.replace("-", " ")


def totals(verdicts: Iterable[Verdict], by_paper: bool = False) -> Table:
    """Return a Table with a row for each scale or, with `by_paper`, for each paper and scale; rows
    without any count are left out. A column for each of the outcomes confirmed, contradicted,
    predicted and not tried has the text of `counted`: facts and, in brackets, claims."""
    every = list(verdicts)
    rows = []
    for paper in dict.fromkeys(each.claim.paper for each in every) if by_paper else ("",):
        for scale in (*SCALES, ""):
            mine = [
                each for each in every if each.scale == scale and paper in ("", each.claim.paper)
            ]
            if any(cells := [counted(mine, outcome) for outcome in WORDS]):
                rows.append((*[PAPERS.get(paper, paper)] * by_paper, scale or "—", *cells))
    return Table((*["paper"] * by_paper, "scale", *map(named, WORDS)), rows, 1 + by_paper)


def counted(verdicts: Sequence[Verdict], outcome: Outcome) -> str:
    """Return a count of the verdicts with this outcome as a text: independent facts and, in
    brackets, claims, as in `3 (5)`; empty if there are no such verdicts.

    The outcome `predicted` is counted among all predictions, `predicted` or `missed`, as in `3 of 4
    (5 of 7)`; a fact with a missed claim is not among the 3. This text is empty only if nothing is
    `missed` either.
    """
    mine = [verdict for verdict in verdicts if verdict.outcome == outcome]
    facts = len({verdict.fact for verdict in mine})
    if outcome != "predicted":
        return f"{facts} ({len(mine)})" if mine else ""
    tried = [verdict for verdict in verdicts if verdict.outcome in ("predicted", "missed")]
    missed = {verdict.fact for verdict in tried if verdict.outcome == "missed"}
    every = {verdict.fact for verdict in tried}
    return f"{len(every - missed)} of {len(every)} ({len(mine)} of {len(tried)})" if tried else ""


def format_summary(verdicts: Sequence[Verdict]) -> str:
    """Return a text that sums verdicts up: a table that counts them by scale, and a table that
    counts them by paper and scale, then the sentences of the function `headlines`."""
    return "\n\n".join(
        [
            *(
                "\n".join(aligned([table.heads, *table.rows]))
                for table in (totals(verdicts), totals(verdicts, True))
            ),
            "\n".join(headlines(verdicts)),
        ]
    )


def headlines(verdicts: Sequence[Verdict]) -> list[str]:
    """Return a list of sentences that explain the verdicts' counts: the meaning of the outcomes and
    scales, then, each if there are such verdicts, how good the predictions are, how many are fitted
    or undecided, and what was not tried; last the number of all."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    said = [
        (
            "Confirmed: our number agrees with the claim, to the printed digits; contradicted: no"
            " rounding explains the difference; predicted: inside our 90 % interval, of all numbers"
            " that no fit has seen."
        ),
        "Facts come first, rows in brackets: rows of one fact hold or fail together.",
        f"{'; '.join(f'{scale}: {meaning}' for scale, meaning in SCALES.items())}.".capitalize(),
    ]
    if skill := skills(verdicts):
        said.append(skill_sentence(skill))
    if counts["fitted"]:
        said.append(f"{counts['fitted']} rows were seen by a fit and have no verdict.")
    if counts["undecided"]:
        said.append(
            f"{counts['undecided']} effects were tried at reduced scale, and the trainings cannot"
            " tell."
        )
    missing = [verdict for verdict in verdicts if verdict.needs]
    if missing:
        exhibits = {each.fact for each in missing if EXHIBIT.fullmatch(each.claim.where)}
        sentences = {each.fact for each in missing} - exhibits
        needs = Counter(each.needs for each in missing)
        said.append(
            f"What was not tried are {len(exhibits)} tables and figures and {len(sentences)}"
            " sentences. Their rows need"
            f" {'; '.join(f'{need}: {needs[need]}' for need in NEEDS if need in needs)}."
        )
    said.append(
        f"{len(verdicts)} rows in all, {counts['of-others']} of them quoted by the documents from"
        " other works."
    )
    return said


class Skill(NamedTuple):
    """Success of one rule in predicting published numbers that no fit has seen, one for each fact.
    `tried` is how many published numbers these are, `inside` how many of them lie in the rule's
    interval, `error` the mean distance of its predictions in percent, and `score` its mean interval
    score in percent, the less the better."""

    tried: int
    inside: int
    """Number of published numbers inside the rule's interval."""
    error: float
    """Mean distance of the predictions from the published numbers, in percent of these."""
    score: float
    """Mean interval score (Gneiting and Raftery 2007, Equation 43), in percent of the number: the
    width of the interval, and for each miss 2/0.1 times how far the number lies beyond. Less is
    better; 0 without intervals."""


def skills(verdicts: Iterable[Verdict]) -> dict[str, Skill]:
    """Return a dict by name of the Skill of the cost model and of each simpler rule in those
    predictions among the verdicts that have baselines; empty if none has. Each fact counts once."""
    facts: dict[str, Verdict] = {}
    for verdict in verdicts:
        if verdict.outcome in ("predicted", "missed") and verdict.baselines:
            facts.setdefault(verdict.fact, verdict)
    predicted = list(facts.values())
    if not predicted:
        return {}
    ranges = {COST_MODEL: [interval(each.record) for each in predicted]}
    for name in predicted[0].baselines:
        ranges[name] = [each.baselines[name] for each in predicted]
    values = [float(each.claim.value) for each in predicted]
    return {name: _skill(values, of_rule) for name, of_rule in ranges.items()}


def _skill(values: Sequence[float], ranges: Sequence[Range]) -> Skill:
    pairs = list(zip(values, ranges, strict=True))
    beyond = [max(each.low - value, value - each.high, 0.0) for value, each in pairs]
    error = fmean(abs(each.value / value - 1) for value, each in pairs)
    score = fmean(
        (each.high - each.low + 20 * far) / value
        for far, (value, each) in zip(beyond, pairs, strict=True)
    )
    return Skill(len(pairs), beyond.count(0.0), 100 * error, 100 * score)


def skill_sentence(skill: Mapping[str, Skill]) -> str:
    """Return a sentence on the predictions of the cost model: how many published numbers it
    predicts, how many of them lie in its 90 % interval, its mean error in percent and its mean
    interval score; for each simpler rule the last three follow in brackets, by its name. `skill`
    has each rule's Skill by name, as `skills` returns it, and must have the cost model's."""
    ours = skill[COST_MODEL]
    beside = "; ".join(
        f"{name} {rule.inside}, {rule.error:.0f} %, {rule.score:.0f}"
        for name, rule in skill.items()
        if name != COST_MODEL
    )
    return (
        f"Of {ours.tried} numbers that {COST_MODEL} predicts unseen, {ours.inside} lie in its 90 %"
        f" interval; mean error {ours.error:.1f} %, interval score {ours.score:.0f} ({beside})."
    )


def interval(record: Record | None) -> Range:
    """Return the 90 % interval of a simulated record, which must not be None, as a Range around its
    value.

    An end that the record does not state is its value, so that the interval has no width on that
    side.
    """
    assert record
    low, high = (record.value if end is None else end for end in (record.low, record.high))
    return Range(record.value, low, high)


def format_verdicts(verdicts: Sequence[Verdict]) -> str:
    """Return a table as one text, with a row for each verdict: claim, published value, our number,
    its kind, outcome, scale, reason.

    A last line counts the outcomes.
    """
    rows = [
        ("claim", "published", "ours", "kind", "verdict", "scale", "reason"),
        *map(_cells, verdicts),
    ]
    return "\n".join([*aligned(rows), "", f"{len(verdicts)} claims: {count_outcomes(verdicts)}"])


def count_outcomes(verdicts: Iterable[Verdict]) -> str:
    """Return the counts of the verdicts by outcome as a text, the commonest first: `3 confirmed, 1
    missed`; `no claims` without verdicts."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    return (
        ", ".join(f"{number} {named(outcome)}" for outcome, number in counts.most_common())
        or "no claims"
    )


def _verdict(
    experiment: Experiment,
    claim: Claim,
    record: Record | None,
    worked: Worked | None,
    results: Results,
) -> Verdict:
    def said(
        outcome: Outcome, scale: Scale, reason: str, number: Record | None = record
    ) -> Verdict:
        return Verdict(
            experiment.name,
            claim,
            outcome,
            scale,
            number,
            reason,
            worked.baselines if worked else {},
        )

    if (record is None or record.kind == "scaled") and (finding := results.findings.get(claim.id)):
        return said(
            finding.outcome,
            "reduced",
            finding.sentence,
            finding.record if finding.is_number else None,
        )
    if record is None:
        was_run = any(each.experiment == experiment.name for each in results.records)
        return said("not-tried", "", _reason(experiment, claim, was_run))
    value = float(claim.value)
    # Not -0.0.
    shown = (
        f"{100 * (record.value - value) / value + 0.0:+.1f} %" if value else f"{record.value:+.3g}"
    )
    if record.kind == "scaled":
        of = "a smaller model or machine"
        if record.note.startswith(STAND_IN):
            of = STAND_IN
        elif record.note.startswith(PARTIAL):
            of = "a part of the test"
        return said("not-tried", "", f"the number is of {of}")
    if record.kind == "simulated":
        ends = interval(record)
        is_inside = ends.low <= value <= ends.high
        lies = "inside" if is_inside else "outside"
        shown += f"; published lies {lies} {ends.low:.4g} to {ends.high:.4g}; {record.note}"
        return said(
            "fitted" if record.note == FITTED else "predicted" if is_inside else "missed",
            "simulated",
            shown,
        )
    ours = worked.range if worked else as_range(record.value)
    is_measured = record.kind != "computed"
    allowed = claim.allowed
    good = claim.agrees(ours, is_measured)
    within = (
        f"{allowed.tolerance} ({allowed.because})"
        if is_measured and allowed != DIGITS
        else "the printed digits"
    )
    if ours.low < ours.high:
        shown += f", {ours.low:.4g} to {ours.high:.4g} by the printed digits"
    asked = "" if claim.says == "exact" else f"; the claim says {claim.says}"
    erratum = None if good else erratum_of(claim)
    reason = f"{shown}{asked}, {'within' if good else 'beyond'} {within}" + (
        f"; an erratum: {erratum.follows}" if erratum else ""
    )
    scale: Scale = "same" if is_measured and claim.confidence != "derived" else "arithmetic"
    return said("confirmed" if good else "contradicted", scale, reason)


def _find(experiment: Experiment, claim: Claim, records: Rows) -> list[Record]:
    """Return a list of the records with the claim's series, quantity and x, in the order of kinds
    of `ORDER`; the first one answers the claim, and without any the list is empty. `records` has
    the experiment's, as a dict (series, quantity, kind) → list of Records.

    If a reproduction answers the experiment, records of the kind `scaled` are of twins, whose
    trainings have lengths of their own. For them the claim's x is first multiplied by the largest x
    of the twins' records and divided by the largest x of the experiment's claims, both with this
    claim's series and quantity.
    """
    mine = (claim.series, claim.quantity)
    at = []
    curve = [
        each.x
        for each in experiment.claims
        if (each.series, each.quantity) == mine and each.x is not None
    ]
    for kind in ORDER:
        of_kind = records.get((*mine, kind), [])
        stretch = 1.0
        if kind == "scaled" and experiment.reproduction and claim.x is not None:
            stretch = max((each.x for each in of_kind if each.x is not None), default=1.0) / max(
                curve
            )
        at += [
            each
            for each in of_kind
            if (each.x is None) == (claim.x is None)
            and math.isclose(each.x or 0, (claim.x or 0) * stretch)
        ]
    return at


def _reason(experiment: Experiment, claim: Claim, was_run: bool) -> str:
    if was_run or not experiment.produces(claim.quantity):
        return experiment.not_run or "the run that was found has no number for this claim"
    if experiment.reproduction:
        return f"no run was found; `mlm-experiment reproduce {experiment.reproduction}` makes one"
    verb = "ablate {} --dataset DIR" if experiment.ablation else "run {}"
    return f"no run was found; `mlm-experiment {verb.format(experiment.name)}` makes one"


def _cells(verdict: Verdict) -> tuple[str, ...]:
    """Return a tuple of the texts of a verdict's row: claim, published value, our number, the
    number's kind, outcome, scale and reason. The number and its kind are empty if no number was
    compared.

    Our number is shown as a dash if it comes from a smaller model or machine.
    """
    record = verdict.record
    ours = ""
    kind = record.kind if record else ""
    if record:
        digits = ".0f" if record.value == round(record.value) else ".4g"
        ours = "—" if kind == "scaled" else format(record.value, digits)
    return (
        verdict.claim.id,
        verdict.claim.published,
        ours,
        kind,
        named(verdict.outcome),
        verdict.scale,
        verdict.reason,
    )
