"""What became of every published claim, each cell with the way to where it came from."""

from collections import Counter
from collections.abc import Sequence, Set
from typing import NamedTuple

from experiments.verdicts import Outcome, Verdict
from reports.exhibit import Table
from reports.numbers import MISSING, show
from reports.style import STYLE

OUTCOMES: dict[Outcome, str] = {outcome: meaning for outcome, (_, meaning) in STYLE["outcomes"].items()}
GLYPHS: dict[Outcome, str] = {outcome: glyph for outcome, (glyph, _) in STYLE["outcomes"].items()}
NOBODY = "none"


class ClaimRow(NamedTuple):
    """A claim as the page lists it."""

    id: str
    published: str
    source: str
    ours: str
    kind: str
    outcome: Outcome
    reason: str
    run: str
    """Name of the run behind our number; empty without one."""
    experiment: str


class OutcomeRow(NamedTuple):
    """An experiment and how many of its claims came out how."""

    experiment: str
    title: str
    exhibit: str
    """Id on the page."""
    counts: tuple[int, ...]
    """In the order of OUTCOMES."""


def outcome_rows(verdicts: Sequence[Verdict], titles: dict[str, str], exhibits: Set[str]) -> list[OutcomeRow]:
    """A row for each experiment in the catalogue's order, last for the claims that none answers."""
    counts: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        counts.setdefault(verdict.experiment or NOBODY, Counter())[verdict.outcome] += 1
    places = {name: name.replace("/", "-") for name in counts}
    return [
        OutcomeRow(
            name,
            titles.get(name, "Claims that no experiment answers"),
            places[name] if places[name] in exhibits else "",
            tuple(count[outcome] for outcome in OUTCOMES),
        )
        for name, count in counts.items()
    ]


def claim_rows(verdicts: Sequence[Verdict], origins: dict[str, str]) -> list[ClaimRow]:
    """Every claim with what was found; `origins` maps the source of a record to the run on the page it came with."""
    rows = []
    for verdict in verdicts:
        claim, record = verdict.claim, verdict.record
        run = origins.get(record.source, "") if record else ""
        rows.append(
            ClaimRow(
                claim.id,
                f"{claim.value}{f' {claim.unit}' if claim.unit else ''}",
                f"{claim.source} {claim.where}",
                show(record.value) if record else MISSING,
                record.kind if record else "",
                verdict.outcome,
                verdict.reason,
                run,
                verdict.experiment or NOBODY,
            )
        )
    return rows


def verdict_table(rows: Sequence[ClaimRow]) -> Table:
    """The claims for a file."""
    return Table(("claim", "published", "source", "ours", "kind", "verdict", "reason", "run", "experiment"), rows, 9)


def outcome_table(rows: Sequence[OutcomeRow]) -> Table:
    """How many claims of each experiment came out how, for a file."""
    heads = ("experiment", *(outcome.replace("_", " ") for outcome in OUTCOMES))
    return Table(heads, [(row.experiment, *map(str, row.counts)) for row in rows])
