"""The stages in order: what `mlm-data run` does one after another and each verb by itself. Imports nothing slow."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StageKind:
    """A stage."""

    name: str
    """Also the name of its section of the configuration and in the ledger."""
    verb: str
    summary: str
    needs_tokenizer: bool = False


STAGES = (
    StageKind("clean", "clean", "Repair broken Unicode with ftfy."),
    StageKind("language", "language", "Keep the documents in one language."),
    StageKind("length", "length", "Drop documents with too few tokens.", needs_tokenizer=True),
    StageKind("deduplicate", "dedup", "Drop near-duplicates."),
    StageKind("decontaminate", "decontaminate", "Cut the text of test sets out."),
    StageKind("split", "split", "Shuffle, and part training from validation documents."),
    StageKind("tokenize", "tokenize", "Write token files, of each split if there are splits.", needs_tokenizer=True),
)
ALL = tuple(stage.name for stage in STAGES)
