"""The attrition ledger: counts of what every stage received, kept, changed and dropped, and why."""

from dataclasses import dataclass, field, replace
from typing import Any

from data_pipeline.document import Document
from data_pipeline.files import Amount, DroppedSample, InputShard, Ledger, StageAttrition
from lineage.errors import BadInput

MAX_SAMPLES = 5
EXCERPT_CHARACTERS = 300


@dataclass
class Entry:
    """Counts of one stage."""

    name: str
    incoming: Amount = field(default_factory=Amount)
    kept: Amount = field(default_factory=Amount)
    dropped: dict[str, Amount] = field(default_factory=dict)
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    changed: int = 0
    seconds: float = 0.0
    """Summed over all processes."""
    note: str = ""

    def drop(self, document: Document, reason: str, size: int, tokens: int = 0) -> None:
        """Count a dropped document; the first few of each reason are kept as samples."""
        self.dropped.setdefault(reason, Amount()).count(size, tokens)
        samples = self.samples.setdefault(reason, [])
        if len(samples) < MAX_SAMPLES:
            samples.append(DroppedSample(id=document.id, excerpt=document.text[:EXCERPT_CHARACTERS]).to_json())

    def merge(self, counts: dict[str, Any]) -> None:
        """Add a task's counts of the same stage, in the form that `asdict` makes."""
        self.incoming.add(Amount(**counts["incoming"]))
        self.kept.add(Amount(**counts["kept"]))
        for reason, amount in counts["dropped"].items():
            self.dropped.setdefault(reason, Amount()).add(Amount(**amount))
        for reason, samples in counts["samples"].items():
            mine = self.samples.setdefault(reason, [])
            mine += samples[: MAX_SAMPLES - len(mine)]
        self.changed += counts["changed"]
        self.seconds += counts["seconds"]

    def to_file(self, in_tokens: bool) -> StageAttrition:
        """The stage as `ledger.json` holds it, most frequent reason first; tokens are null if they were not counted."""
        reasons = sorted(self.dropped, key=lambda reason: (-self.dropped[reason].documents, reason))
        return StageAttrition(
            name=self.name,
            documents_in=self.incoming.documents,
            documents_out=self.kept.documents,
            bytes_in=self.incoming.bytes,
            bytes_out=self.kept.bytes,
            tokens_in=self.incoming.tokens if in_tokens else None,
            tokens_out=self.kept.tokens if in_tokens else None,
            dropped={reason: _written(self.dropped[reason], in_tokens) for reason in reasons},
            changed=self.changed,
            samples={
                reason: [DroppedSample.model_validate(sample) for sample in self.samples[reason]] for reason in reasons
            },
            seconds=round(self.seconds, 3),
            note=self.note,
        )


@dataclass
class OpenLedger:
    """The ledger while it is counted: the stages in order."""

    source: str
    in_tokens: bool = True
    """False if there is no tokenizer to count tokens with."""
    stages: list[Entry] = field(default_factory=list)
    malformed: int = 0
    blank: int = 0
    shards: list[InputShard] = field(default_factory=list)
    """Shards of the input."""

    def enter(self, tasks: list[dict[str, Any]]) -> None:
        """Add the counts of tasks, each a list of stages."""
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

    def to_file(self, splits: dict[str, Amount]) -> Ledger:
        """The whole of `ledger.json`, near-duplicates left out."""
        return Ledger(
            source=self.source,
            stages=[stage.to_file(self.in_tokens) for stage in self.stages],
            splits={name: _written(amount, self.in_tokens) for name, amount in splits.items()},
            malformed_lines=self.malformed,
            blank_lines=self.blank,
            shards=self.shards,
        )


def _written(amount: Amount, in_tokens: bool) -> Amount:
    """The amount as the file holds it: tokens are null if they were not counted."""
    return amount if in_tokens else replace(amount, tokens=None)


def format_ledger(ledger: Ledger) -> str:
    """The ledger as a table for a terminal: one line for each stage, and below it one for each reason."""
    rows: list[tuple[str, ...]] = [("stage", "documents", "bytes", "tokens", "changed", "seconds")]
    notes = []
    for stage in ledger.stages:
        counts = map(_cell, (stage.documents_out, stage.bytes_out, stage.tokens_out, stage.changed))
        rows.append((stage.name, *counts, "" if stage.seconds is None else f"{stage.seconds:.1f}"))
        for reason, amount in stage.dropped.items():
            rows.append((f"  {reason}", *_cells(amount, "-")))
        if stage.note:
            notes.append(f"{stage.name}: {stage.note}")
    rows += [(f"= {name}", *_cells(split)) for name, split in ledger.splits.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for name, *cells in rows:
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *numbers]).rstrip())
    return "\n".join([f"source: {ledger.source}", *lines, f"malformed lines: {ledger.malformed_lines:,}", *notes])


def _cells(amount: Amount, sign: str = "") -> tuple[str, ...]:
    return (*(_cell(number, sign) for number in (amount.documents, amount.bytes, amount.tokens)), "", "")


def _cell(number: int | None, sign: str = "") -> str:
    return "" if number is None else f"{sign}{number:,}"
