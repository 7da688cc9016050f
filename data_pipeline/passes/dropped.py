"""Documents that a stage drops: entered in the ledger and, where a recipe keeps them, written with
stage and reason."""

from pathlib import Path

import orjson

from mlm_repro.data_pipeline.document import Document
from mlm_repro.data_pipeline.files import StageAttrition

DROPPED = "dropped.jsonl"


def drop(
    place: Path | None,
    entry: StageAttrition,
    document: Document,
    reason: str,
    size: int,
    tokens: int = 0,
) -> None:
    """Enter a document, as it came to the stage, under a reason; write it to a file in `place`, if
    there is one."""
    entry.drop(document, reason, size, tokens)
    if place:
        row = document.to_json() | {"stage": entry.name, "reason": reason}
        with (place / DROPPED).open("ab") as file:
            file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
