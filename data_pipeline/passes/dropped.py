"""Entry of a dropped document in the ledger and, if the recipe keeps dropped documents, in a file
with stage and reason."""

from pathlib import Path

from mlm_repro.data_pipeline.document import Document, json_line
from mlm_repro.data_pipeline.files import StageAttrition

DROPPED = "dropped.jsonl"


def drop(
    folder: Path | None,
    entry: StageAttrition,
    document: Document,
    reason: str,
    size: int,
    tokens: int = 0,
) -> None:
    """Count a dropped document, which has `size` bytes and `tokens` tokens as it came to the stage,
    under a reason in `entry`, the stage's ledger entry, which is changed; the entry also keeps the
    id and the first characters of a reason's first documents. With a `folder`, append the document
    with the keys `stage` and `reason` as a JSON line to `dropped.jsonl` there."""
    entry.drop(document, reason, size, tokens)
    if folder:
        row = document.to_json() | {"stage": entry.name, "reason": reason}
        with (folder / DROPPED).open("ab") as file:
            file.write(json_line(row))
