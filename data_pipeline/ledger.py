"""The attrition ledger: what every stage received, kept, changed and dropped, and why."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from data_pipeline.document import Document, Drop, size_bytes
from lineage.errors import BadInput

MAX_SAMPLES = 5
EXCERPT_CHARACTERS = 300


@dataclass
class Amount:
    """A number of documents with their UTF-8 bytes and tokens; each document's end-of-text token is counted."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0

    def add(self, document: Document, tokens: int) -> None:
        """Count one document."""
        self.documents += 1
        self.bytes += size_bytes(document.text)
        self.tokens += tokens


@dataclass
class Stage:
    """What one stage did."""

    name: str
    incoming: Amount = field(default_factory=Amount)
    kept: Amount = field(default_factory=Amount)
    dropped: dict[str, Amount] = field(default_factory=dict)
    samples: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    changed: int = 0
    seconds: float = 0.0
    note: str = ""

    def take(self, document: Document, tokens: int = 0) -> None:
        """Count a document that came in."""
        self.incoming.add(document, tokens)

    def keep(self, document: Document, tokens: int = 0) -> None:
        """Count a document that went on to the next stage."""
        self.kept.add(document, tokens)

    def drop(self, document: Document, drop: Drop, tokens: int = 0) -> None:
        """Count a dropped document; the first few of each reason are kept as samples."""
        self.dropped.setdefault(drop.reason, Amount()).add(document, tokens)
        samples = self.samples.setdefault(drop.reason, [])
        if len(samples) < MAX_SAMPLES:
            samples.append({"id": document.id, "excerpt": document.text[:EXCERPT_CHARACTERS]})

    def to_json(self) -> dict[str, Any]:
        """The stage as `ledger.json` holds it, most frequent reason first."""
        reasons = sorted(self.dropped, key=lambda reason: (-self.dropped[reason].documents, reason))
        return {
            "name": self.name,
            "documents_in": self.incoming.documents,
            "documents_out": self.kept.documents,
            "bytes_in": self.incoming.bytes,
            "bytes_out": self.kept.bytes,
            "tokens_in": self.incoming.tokens,
            "tokens_out": self.kept.tokens,
            "dropped": {reason: asdict(self.dropped[reason]) for reason in reasons},
            "changed": self.changed,
            "samples": {reason: self.samples[reason] for reason in reasons},
            "seconds": round(self.seconds, 3),
            "note": self.note,
        }


@dataclass
class Ledger:
    """The stages in order."""

    source: str
    stages: list[Stage] = field(default_factory=list)
    malformed: int = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """Open the next stage and time it. Raises BadInput if it ends with no documents."""
        stage = Stage(name)
        self.stages.append(stage)
        start = time.monotonic()
        yield stage
        stage.seconds += time.monotonic() - start
        if not stage.kept.documents:
            raise BadInput(self._sentence_about_nothing(stage))

    def _sentence_about_nothing(self, stage: Stage) -> str:
        if stage.name == "source":
            quarantined = f" ({self.malformed:,} malformed lines)" if self.malformed else ""
            return f"the corpus is empty: {self.source} gave no documents{quarantined}"
        reasons = ", ".join(f"{reason}: {amount.documents:,}" for reason, amount in stage.dropped.items())
        return f"nothing is left of the corpus after the {stage.name} stage, which dropped every document ({reasons})"

    def to_json(self, splits: dict[str, Any]) -> dict[str, Any]:
        """The whole of `ledger.json`."""
        return {
            "source": self.source,
            "stages": [stage.to_json() for stage in self.stages],
            "splits": splits,
            "malformed_lines": self.malformed,
        }


def format_ledger(ledger: dict[str, Any]) -> str:
    """The ledger as a table for a terminal: one line for each stage, and below it one for each reason."""
    rows: list[tuple[str, ...]] = [("stage", "documents", "bytes", "tokens", "changed", "seconds")]
    notes = []
    for stage in ledger["stages"]:
        counts = (f"{stage[f'{unit}_out']:,}" for unit in ("documents", "bytes", "tokens"))
        rows.append((stage["name"], *counts, f"{stage['changed']:,}", f"{stage['seconds']:.1f}"))
        for reason, amount in stage["dropped"].items():
            lost = (f"-{amount[unit]:,}" for unit in ("documents", "bytes", "tokens"))
            rows.append((f"  {reason}", *lost, "", ""))
        if stage["note"]:
            notes.append(f"{stage['name']}: {stage['note']}")
    for name, split in ledger["splits"].items():
        counts = (f"{split[unit]:,}" for unit in ("documents", "bytes", "tokens"))
        rows.append((f"= {name}", *counts, "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for name, *cells in rows:
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *numbers]).rstrip())
    return "\n".join([f"source: {ledger['source']}", *lines, f"malformed lines: {ledger['malformed_lines']:,}", *notes])
