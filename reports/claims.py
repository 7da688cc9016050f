"""Published claims with their verdicts and records, grouped by outcome and by paper."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from statistics import mode
from typing import NamedTuple, Self

from mlm_repro.experiments.catalogue import PAPERS, Claim, Experiment, erratum_of, read_errata
from mlm_repro.experiments.scores import EXPERIMENT as ORDER
from mlm_repro.experiments.verdicts import Outcome, Verdict, named
from mlm_repro.lineage.numbers import MISSING, show
from mlm_repro.lineage.records import Kind
from mlm_repro.reports.exhibit import Exhibit, Table
from mlm_repro.reports.style import CONFIDENCES, LOOKS, STYLE

UNCOUNTED: Outcome = "of-others"
OWN: tuple[Kind, ...] = ("measured", "counted", "computed")
"""Kinds of numbers that an erratum may rest on."""


class Claims(tuple[Verdict, ...]):
    """Claims with their verdicts."""

    @classmethod
    def of(cls, verdicts: Iterable[Verdict]) -> Self:
        """The claims in the order of their outcomes."""
        order = list(LOOKS)
        return cls(sorted(verdicts, key=lambda each: order.index(each.outcome)))

    @property
    def counts(self) -> Counter[Outcome]:
        """Number of claims by outcome."""
        return Counter(each.outcome for each in self)

    @property
    def counted(self) -> int:
        """Number of the documents' own claims."""
        return len(self) - self.counts[UNCOUNTED]

    @property
    def deviations(self) -> list[float]:
        """How far our numbers are from the published ones, as shares, of the claims that state a
        number."""
        return [
            abs(each.record.value / float(each.claim.value) - 1)
            for each in self
            if each.record
            and each.scale not in ("", "reduced")
            and each.claim.relation == "="
            and each.claim.value
        ]

    def by(self, what: str) -> "dict[str, Claims]":
        """Claims grouped by `experiment`, `paper`, `reason`, `needs` or `outcome`, each group at
        its first claim."""
        parts: dict[str, list[Verdict]] = defaultdict(list)
        for each in self:
            parts[each.claim.paper if what == "paper" else getattr(each, what)].append(each)
        return {name: Claims(part) for name, part in parts.items()}


class Group(NamedTuple):
    """Outcomes of one kind, such as those of measured claims, with their claims."""

    name: str
    title: str
    rows: str
    """Unit of a row of the table: a claim, or an experiment, a reason or a need with its claims."""
    text: str
    outcomes: tuple[Outcome, ...]
    claims: Claims

    @property
    def parts(self) -> dict[str, Claims]:
        """Claims by experiment in the catalogue's order, or by reason or need, the commonest
        first."""
        parts = self.claims.by(self.rows)
        return (
            dict(sorted(parts.items(), key=lambda at: -len(at[1])))
            if self.rows in ("reason", "needs")
            else parts
        )

    @property
    def against(self) -> Claims:
        """Claims that our results contradict, and predictions that missed."""
        return Claims(each for each in self.claims if each.is_against or each.outcome == "missed")


class PaperPart(NamedTuple):
    """A table or figure of a paper with its claims."""

    title: str
    place: str
    """Id of its exhibit on the page; empty without one."""
    exhibit: Exhibit | None
    """The exhibit, if it is drawn in this part."""
    claims: Claims

    @property
    def shared(self) -> dict[str, str]:
        """Facts common to all claims, shown once."""
        said = [described(each.claim) for each in self.claims]
        return {
            label: text
            for label, text in said[0].items()
            if all(facts.get(label) == text for facts in said)
        }


class Paper(NamedTuple):
    """A paper's part of the page."""

    name: str
    title: str
    parts: tuple[PaperPart, ...]
    claims: Claims


def described(claim: Claim) -> dict[str, str]:
    """Sentence, source, protocol, tolerance, class and note of a claim, by label."""
    allowed = claim.allowed
    told = {
        "Says": claim.sentence and f"“{claim.sentence}”",
        "Read in": f"{claim.citation}, {CONFIDENCES[claim.confidence]}",
        "Protocol": claim.protocol,
        "Tolerance": f"{allowed.tolerance}: {allowed.because}",
        "Class": claim.says,
        "Note": claim.notes,
    }
    return {label: text for label, text in told.items() if text not in ("", "exact")}


def group_claims(claims: Claims) -> list[Group]:
    """Groups of claims in the order of the outcomes; the group of measured claims may be empty."""
    groups: list[Group] = []
    for name, (title, rows, text) in STYLE["groups"].items():
        some = Claims(each for each in claims if (each.scale or each.outcome) == name)
        if some or not groups:
            groups.append(
                Group(name, title, rows, text, tuple(o for o in LOOKS if some.counts[o]), some)
            )
    return groups


def paper_parts(
    claims: Claims,
    experiments: Mapping[str, Experiment],
    drawn: Mapping[str, Exhibit],
    elsewhere: Iterable[str],
) -> list[Paper]:
    """Each paper with its tables and figures. An exhibit stands in the paper that most of its
    claims are from.

    `drawn` has exhibits by experiment; `elsewhere` has the ids of exhibits in other parts of the
    page.
    """
    places = {*elsewhere, *(exhibit.name for exhibit in drawn.values())}
    homes = {
        name: mode([claim.paper for claim in experiments[name].claims] or [name.partition("/")[0]])
        for name in drawn
    }
    papers = []
    for paper, mine in sorted(
        claims.by("paper").items(), key=lambda part: [*PAPERS].index(part[0])
    ):
        theirs = Claims(each for each in mine if each.outcome == UNCOUNTED)
        asked = Claims(each for each in mine if each.outcome != UNCOUNTED).by("experiment")
        parts = []
        for name in (*experiments, ""):
            if name not in asked and homes.get(name) != paper:
                continue
            title, place = (
                experiments[name].title if name else "Claims without an experiment",
                name.replace("/", "-"),
            )
            # Some have questions of our own alone.
            exhibit = drawn[name] if homes.get(name) == paper else None
            parts.append(
                PaperPart(
                    title, place if place in places else "", exhibit, asked.get(name, Claims(()))
                )
            )
        if theirs:
            parts.append(PaperPart(STYLE["groups"][UNCOUNTED][0], "", None, theirs))
        papers.append(Paper(paper, PAPERS[paper], tuple(parts), mine))
    return papers


def forecast_of_order(verdicts: Iterable[Verdict]) -> str:
    """The verdicts on the order of the sizes that had a forecast before their trainings; empty if
    none was tried."""
    tried = [each for each in verdicts if each.experiment == ORDER and each.scale == "reduced"]
    if not tried:
        return ""
    told = ", ".join(
        f"the step to {each.claim.id.rpartition('/')[2]} is {named(each.outcome)}"
        for each in sorted(tried, key=lambda each: each.claim.id)
    )
    return f"In other runs, whose forecast was sealed before they were trained, {told}."


def errata_exhibit(claims: Claims) -> Exhibit:
    """Places where a document disagrees with itself, with what was found here about the printed
    numbers."""
    rows = []
    for erratum in (errata := read_errata().errata):
        own = {
            f"{each.claim.id}: {show(each.record.value)}": None
            for each in claims
            if erratum_of(each.claim) is erratum and each.record and each.record.kind in OWN
        }
        heads = (
            f"{erratum.document}, {erratum.place}",
            erratum.printed,
            erratum.follows,
            erratum.kind,
        )
        rows.append(
            (*heads, "; ".join(own) or MISSING, unlinked(erratum.found), unlinked(erratum.answered))
        )
    sure = sum(erratum.kind == "arithmetic" for erratum in errata)
    caption = [
        (
            f"{len(rows)} places where a document disagrees with itself, {sure} of them by its own"
            " arithmetic."
        ),
        "Each is derived in docs/errata.md from quotations, with the command that shows it.",
    ]
    table = Table(
        ("place", "printed", "follows from it", "class", "here", "found", "answered"), rows, 7
    )
    return Exhibit(
        "errata",
        "Errata in the papers",
        caption,
        table,
        "mlm-experiment compare --all",
        tables=(table,),
    )


def unlinked(text: str) -> str:
    """The text with each Markdown link as its words."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text)


def verdicts_exhibit(claims: Claims, homes: Mapping[str, str]) -> Exhibit:
    """All claims as data."""
    heads = (
        "claim",
        "published",
        "source",
        "ours",
        "kind",
        "verdict",
        "scale",
        "reason",
        "run",
        "experiment",
    )
    rows = []
    for verdict in claims:
        claim = verdict.claim
        record = verdict.record
        ours = (show(record.value), record.kind) if record else (MISSING, "")
        run = homes.get(record.source, "") if record else ""
        rows.append(
            (
                claim.id,
                claim.published,
                claim.citation,
                *ours,
                named(verdict.outcome),
                verdict.scale,
                verdict.reason,
                run,
                verdict.experiment or "none",
            )
        )
    return Exhibit("verdicts", "Every claim with its verdict", (), Table(heads, rows, 10))
