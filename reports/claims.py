"""Published claims with their verdicts and records, grouped by outcome and by paper."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
"""Kinds of numbers that our text on an erratum may rest on."""


class Claims(tuple[Verdict, ...]):
    """Tuple of Verdicts, each with its claim. The class method `of` makes a Claims of Verdicts and
    sorts them by outcome, and `by` returns a dict value → Claims, grouped by one of a Verdict's
    fields. The property `counts` is a Counter outcome → number of claims, `counted` the number of
    all claims but the ones with the outcome `of-others`, and `deviations` a list of the relative
    distances of our numbers from the published ones."""

    @classmethod
    def of(cls, verdicts: Iterable[Verdict]) -> Self:
        """Return the verdicts as a Claims, sorted by outcome in the page's order; within an outcome
        they keep their order."""
        order = list(LOOKS)
        return cls(sorted(verdicts, key=lambda verdict: order.index(verdict.outcome)))

    @property
    def counts(self) -> Counter[Outcome]:
        """Counter outcome → number of claims."""
        return Counter(verdict.outcome for verdict in self)

    @property
    def counted(self) -> int:
        """Number of claims, except the ones whose outcome is `of-others`, which documents quote
        from other works."""
        return len(self) - self.counts[UNCOUNTED]

    @property
    def deviations(self) -> list[float]:
        """List of how far our numbers are from the published ones: |ours / published − 1|, a float,
        for each claim that was tried, but not at reduced scale, and that states an exact or
        approximate number other than 0."""
        return [
            abs(verdict.record.value / float(verdict.claim.value) - 1)
            for verdict in self
            if verdict.record
            and verdict.scale not in ("", "reduced")
            and verdict.claim.relation == "="
            and verdict.claim.value
        ]

    def by(self, what: str) -> "dict[str, Claims]":
        """Return a dict value → Claims, the claims grouped by the verdict's field that `what`
        names, such as `experiment`, `reason`, `needs` or `outcome`, or by `paper`, in the order of
        each group's first claim."""
        groups = defaultdict(list)
        for verdict in self:
            name = verdict.claim.paper if what == "paper" else getattr(verdict, what)
            groups[name].append(verdict)
        return {name: Claims(group) for name, group in groups.items()}


class Group(NamedTuple):
    """Section of the page: a title, a text, and the claims of one scale, such as measured, or of
    one outcome; `name` is that scale or outcome. `outcomes` are those that its claims have, in the
    page's order."""

    name: str
    title: str
    rows: str
    """Field of a verdict that the section's table has a row for: `claim`, or `experiment`, `reason`
    or `needs` with its claims."""
    text: str
    outcomes: Sequence[Outcome]
    claims: Claims

    @property
    def parts(self) -> dict[str, Claims]:
        """Dict value → Claims: the section's claims grouped by the verdict's field that `rows`
        names: by reason or need, the most frequent first, or by experiment, in the order of each
        experiment's first claim."""
        parts = self.claims.by(self.rows)
        if self.rows not in ("reason", "needs"):
            return parts
        return dict(sorted(parts.items(), key=lambda at: -len(at[1])))

    @property
    def against(self) -> Claims:
        """Claims of this section, as a Claims: those that our results contradict, except at reduced
        scale, and predictions that missed."""
        return Claims(
            verdict for verdict in self.claims if verdict.is_against or verdict.outcome == "missed"
        )


class PaperPart(NamedTuple):
    """Part of a paper's section of the page: an experiment's title, its `exhibit`, a table or
    figure, and its `claims`, if there are any; or the claims without an experiment; or, as the last
    part, the claims on numbers of others, which nobody tried here. Claims come as verdicts."""

    title: str
    place: str
    """Id on the page of this part's exhibit; empty if it has no exhibit."""
    exhibit: Exhibit | None
    """The exhibit, if it is drawn in this part; None otherwise."""
    claims: Claims

    @property
    def shared(self) -> dict[str, str]:
        """Dict label → text of the facts, as the function `described` gives them (sentence, source,
        protocol, tolerance, class, note), that all claims of this part have in common; the page
        shows them once. There must be a claim."""
        described_claims = [described(verdict.claim) for verdict in self.claims]
        return {
            label: text
            for label, text in described_claims[0].items()
            if all(facts.get(label) == text for facts in described_claims)
        }


class Paper(NamedTuple):
    """Section of the page for one paper: all its claims, and the same claims divided into parts,
    most parts with one experiment's table or figure."""

    name: str
    title: str
    parts: Sequence[PaperPart]
    claims: Claims


def described(claim: Claim) -> dict[str, str]:
    """Return the facts of a claim as a dict label on the page → text: the sentence in quotation
    marks, the source with how it was read, the protocol, the tolerance with its reason, the class
    and the note. Empty texts and the class `exact` are left out."""
    allowed = claim.allowed
    facts = {
        "Says": claim.sentence and f"“{claim.sentence}”",
        "Read in": f"{claim.citation}, {CONFIDENCES[claim.confidence]}",
        "Protocol": claim.protocol,
        "Tolerance": f"{allowed.tolerance}: {allowed.because}",
        "Class": claim.says,
        "Note": claim.notes,
    }
    return {label: text for label, text in facts.items() if text not in ("", "exact")}


def group_claims(claims: Claims) -> list[Group]:
    """Return a list of the page's sections of claims in its order, each a Group with the claims of
    one scale or, without a scale, of one outcome. Empty sections are left out, except the first, of
    measured claims."""
    groups: list[Group] = []
    for name, (title, rows, text) in STYLE["groups"].items():
        some = Claims(verdict for verdict in claims if (verdict.scale or verdict.outcome) == name)
        if some or not groups:
            groups.append(
                Group(name, title, rows, text, [each for each in LOOKS if some.counts[each]], some)
            )
    return groups


def paper_parts(
    claims: Claims,
    experiments: Mapping[str, Experiment],
    drawn: Mapping[str, Exhibit],
    elsewhere: Iterable[str],
) -> list[Paper]:
    """Return a list of a Paper, its section of the page, for each paper that has claims, in the
    page's order. The parts of a Paper are, in the order of `experiments`, one for each experiment
    that has claims of the paper, apart from claims on numbers of others, or an exhibit that belongs
    to the paper; then, each if there are such claims, one for claims without an experiment and one
    for claims on numbers of others. An exhibit belongs to the paper that most of its experiment's
    claims are from or, without claims, to the one that begins the experiment's name.

    `drawn` has exhibits by the experiment's name, `experiments` all experiments by name.
    `elsewhere` are the ids of exhibits in other parts of the page; a part whose exhibit is there
    leads to it.
    """
    ids = {*elsewhere, *(exhibit.name for exhibit in drawn.values())}
    homes = {
        name: mode([claim.paper for claim in experiments[name].claims] or [name.partition("/")[0]])
        for name in drawn
    }
    papers = []
    for paper, mine in sorted(
        claims.by("paper").items(), key=lambda part: [*PAPERS].index(part[0])
    ):
        theirs = mine.by("outcome").get(UNCOUNTED)
        asked = Claims(verdict for verdict in mine if verdict.outcome != UNCOUNTED).by("experiment")
        parts = []
        for name in (*experiments, ""):
            if name not in asked and homes.get(name) != paper:
                continue
            title = experiments[name].title if name else "Claims without an experiment"
            anchor = name.replace("/", "-")
            place = anchor if anchor in ids else ""
            exhibit = drawn[name] if homes.get(name) == paper else None
            # Some have questions of our own alone.
            parts.append(PaperPart(title, place, exhibit, asked.get(name, Claims())))
        if theirs:
            parts.append(PaperPart(STYLE["groups"][UNCOUNTED][0], "", None, theirs))
        papers.append(Paper(paper, PAPERS[paper], parts, mine))
    return papers


def forecast_of_order(verdicts: Iterable[Verdict]) -> str:
    """Return a sentence on the claims that each larger model ends at a lower perplexity; a forecast
    of these was sealed before the trainings. It gives from `verdicts` the outcome of each such
    claim that was tried at reduced scale, in order of the claims' ids. Other verdicts are passed
    over; the text is empty if none is left."""
    tried = [
        verdict
        for verdict in verdicts
        if verdict.experiment == ORDER and verdict.scale == "reduced"
    ]
    if not tried:
        return ""
    outcomes = ", ".join(
        f"the step to {verdict.claim.id.rpartition('/')[2]} is {named(verdict.outcome)}"
        for verdict in sorted(tried, key=lambda verdict: verdict.claim.id)
    )
    return f"In other runs, whose forecast was sealed before they were trained, {outcomes}."


def errata_exhibit(claims: Claims) -> Exhibit:
    """Return the Exhibit `errata`, a table with a row for each contradiction inside a document that
    errata.toml lists, in its order: the place, the printed text, the text that follows, the kind of
    contradiction, our numbers on it by claim, if they were measured, counted or computed, the
    person who found it, and the authors' answer. `claims` have our numbers."""
    rows = []
    errata = read_errata().errata
    for erratum in errata:
        own = dict.fromkeys(
            f"{verdict.claim.id}: {show(verdict.record.value)}"
            for verdict in claims
            if erratum_of(verdict.claim) is erratum
            and verdict.record
            and verdict.record.kind in OWN
        )
        rows.append(
            (
                f"{erratum.document}, {erratum.place}",
                erratum.printed,
                erratum.follows,
                erratum.kind,
                "; ".join(own) or MISSING,
                unlinked(erratum.found),
                unlinked(erratum.answered),
            )
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
    """Return the text with each Markdown link `[words](address)` replaced by the words in its
    brackets."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text)


def verdicts_exhibit(claims: Claims, homes: Mapping[str, str]) -> Exhibit:
    """Return the Exhibit `verdicts`, of data alone, a table with a row for each claim: the
    published number, ours, the verdict and the run behind our number. `homes` has the run's name on
    the page for each source of a record."""
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
