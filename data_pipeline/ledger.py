"""The attrition ledger: what every stage received, kept, changed and dropped, and why."""

from dataclasses import asdict, dataclass, field
from typing import Any

from data_pipeline.document import Document
from lineage.errors import BadInput

MAX_SAMPLES = 5
EXCERPT_CHARACTERS = 300


@dataclass
class Amount:
    """A number of documents with their UTF-8 bytes and tokens; each document's end-of-text token is counted."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0

    def add(self, other: "Amount") -> None:
        """Count what the other counted."""
        self.documents += other.documents
        self.bytes += other.bytes
        self.tokens += other.tokens

    def count(self, size: int, tokens: int) -> None:
        """Count one document of `size` bytes."""
        self.documents += 1
        self.bytes += size
        self.tokens += tokens


@dataclass
class Entry:
    """What one stage did."""

    name: str
    incoming: Amount = field(default_factory=Amount)
    kept: Amount = field(default_factory=Amount)
    dropped: dict[str, Amount] = field(default_factory=dict)
    samples: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    changed: int = 0
    seconds: float = 0.0
    """Of all processes together."""
    note: str = ""

    def take(self, size: int, tokens: int = 0) -> None:
        """Count a document that came in, of `size` bytes."""
        self.incoming.count(size, tokens)

    def keep(self, size: int, tokens: int = 0) -> None:
        """Count a document that went on to the next stage."""
        self.kept.count(size, tokens)

    def drop(self, document: Document, reason: str, size: int, tokens: int = 0) -> None:
        """Count a dropped document; the first few of each reason are kept as samples."""
        self.dropped.setdefault(reason, Amount()).count(size, tokens)
        samples = self.samples.setdefault(reason, [])
        if len(samples) < MAX_SAMPLES:
            samples.append({"id": document.id, "excerpt": document.text[:EXCERPT_CHARACTERS]})

    def merge(self, counts: dict[str, Any]) -> None:
        """Add what a task counted in a stage of the same name, given as `asdict` makes it."""
        self.incoming.add(Amount(**counts["incoming"]))
        self.kept.add(Amount(**counts["kept"]))
        for reason, amount in counts["dropped"].items():
            self.dropped.setdefault(reason, Amount()).add(Amount(**amount))
        for reason, samples in counts["samples"].items():
            mine = self.samples.setdefault(reason, [])
            mine += samples[: MAX_SAMPLES - len(mine)]
        self.changed += counts["changed"]
        self.seconds += counts["seconds"]

    def to_json(self, in_tokens: bool) -> dict[str, Any]:
        """The stage as `ledger.json` holds it, most frequent reason first; tokens are null if they were not counted."""
        reasons = sorted(self.dropped, key=lambda reason: (-self.dropped[reason].documents, reason))
        return {
            "name": self.name,
            "documents_in": self.incoming.documents,
            "documents_out": self.kept.documents,
            "bytes_in": self.incoming.bytes,
            "bytes_out": self.kept.bytes,
            "tokens_in": self.incoming.tokens if in_tokens else None,
            "tokens_out": self.kept.tokens if in_tokens else None,
            "dropped": {reason: amount_json(self.dropped[reason], in_tokens) for reason in reasons},
            "changed": self.changed,
            "samples": {reason: self.samples[reason] for reason in reasons},
            "seconds": round(self.seconds, 3),
            "note": self.note,
        }


def amount_json(amount: Amount, in_tokens: bool) -> dict[str, Any]:
    """An amount as `ledger.json` holds it."""
    return asdict(amount) | ({} if in_tokens else {"tokens": None})


@dataclass
class Ledger:
    """The stages in order."""

    source: str
    in_tokens: bool = True
    """Whether tokens are counted; without a tokenizer they are not."""
    stages: list[Entry] = field(default_factory=list)
    malformed: int = 0
    blank: int = 0
    shards: list[dict[str, Any]] = field(default_factory=list)
    """Of each shard of the input: what it was read from, how many documents the first pass kept, their digest."""

    def enter(self, tasks: list[dict[str, Any]]) -> None:
        """Add what the tasks counted, each a list of stages."""
        for counts in tasks:
            for stage in counts["stages"]:
                self.stage(stage["name"]).merge(stage)

    def stage(self, name: str) -> Entry:
        """The entry of the stage of that name; a new one stands last."""
        entry = next((stage for stage in self.stages if stage.name == name), None)
        if entry is None:
            entry = Entry(name)
            self.stages.append(entry)
        return entry

    def check(self, max_bad_fraction: float) -> None:
        """Raise BadInput if a stage kept nothing, or if more of the input is malformed than may be."""
        if empty := next((stage for stage in self.stages if not stage.kept.documents), None):
            raise BadInput(self._sentence_about_nothing(empty))
        lines = self.malformed + self.stages[0].incoming.documents
        if self.malformed > max_bad_fraction * lines:
            raise BadInput(
                f"{self.malformed:,} of {lines:,} lines are no documents, more than sources.max_bad_fraction = "
                f"{max_bad_fraction:g} allows"
            )

    def _sentence_about_nothing(self, stage: Entry) -> str:
        if stage.name == "source":
            quarantined = f" ({self.malformed:,} malformed lines)" if self.malformed else ""
            return f"the corpus is empty: {self.source} gave no documents{quarantined}"
        reasons = ", ".join(f"{reason}: {amount.documents:,}" for reason, amount in stage.dropped.items())
        return f"nothing is left of the corpus after the {stage.name} stage, which dropped every document ({reasons})"

    def to_json(self, splits: dict[str, Any]) -> dict[str, Any]:
        """The whole of `ledger.json`."""
        return {
            "source": self.source,
            "stages": [stage.to_json(self.in_tokens) for stage in self.stages],
            "splits": splits,
            "malformed_lines": self.malformed,
            "blank_lines": self.blank,
            "shards": self.shards,
        }


def format_ledger(ledger: dict[str, Any]) -> str:
    """The ledger as a table for a terminal: one line for each stage, and below it one for each reason."""
    rows: list[tuple[str, ...]] = [("stage", "documents", "bytes", "tokens", "changed", "seconds")]
    notes = []
    for stage in ledger["stages"]:
        counts = (_cell(stage[f"{unit}_out"]) for unit in ("documents", "bytes", "tokens"))
        rows.append((stage["name"], *counts, f"{stage['changed']:,}", f"{stage['seconds']:.1f}"))
        for reason, amount in stage["dropped"].items():
            lost = (_cell(amount[unit], "-") for unit in ("documents", "bytes", "tokens"))
            rows.append((f"  {reason}", *lost, "", ""))
        if stage["note"]:
            notes.append(f"{stage['name']}: {stage['note']}")
    for name, split in ledger["splits"].items():
        counts = (_cell(split[unit]) for unit in ("documents", "bytes", "tokens"))
        rows.append((f"= {name}", *counts, "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for name, *cells in rows:
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *numbers]).rstrip())
    return "\n".join([f"source: {ledger['source']}", *lines, f"malformed lines: {ledger['malformed_lines']:,}", *notes])


def _cell(number: int | None, sign: str = "") -> str:
    return "" if number is None else f"{sign}{number:,}"
