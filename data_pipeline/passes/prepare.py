"""The first pass over a shard: reads documents and applies the stages that need only their text."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, count
from operator import ne
from pathlib import Path

import orjson

from data_pipeline.document import Document, Drop, Malformed, Unfit, size_bytes
from data_pipeline.files import StageAttrition
from data_pipeline.reading.pieces import Piece
from data_pipeline.reading.readers import Limits, malformed, read_pieces
from data_pipeline.stages import TEXT_FILTERS
from data_pipeline.stages.stage import SOURCE, TextFilter
from data_pipeline.work.document_shard import DocumentWriter
from data_pipeline.work.tasks import Counts, Settings

QUARANTINE, UNCOUNTED = "quarantine.jsonl", "uncounted.jsonl"


@dataclass
class Uncounted:
    """Changes to a document in the first pass, kept until there is a tokenizer to count its texts with."""

    last: int
    """Number of the last stage that saw the document; the source is 0."""
    changes: list[tuple[int, str, str]]
    """Stages that changed the document, with the `difference` of its texts before and after."""
    kept: int | None = None
    """Number of the document among those of the shard, None if it is dropped."""
    reason: str = ""
    text: str = ""
    """Reason why the last stage dropped the document, and its text there."""


def prepare(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Write the kept documents of a shard, its malformed input, and the changes and drops.

    Settings: `pieces`, `limits`, and `filters`: pairs of a TextFilter's name and its section of the recipe.
    """
    filters = [TEXT_FILTERS[name](**section) for name, section in settings["filters"]]
    entries = [StageAttrition.begin(name) for name in (SOURCE, *(each.name for each in filters))]
    pieces = [Piece(**piece) for piece in settings["pieces"]]
    bad = blank = 0
    start = time.perf_counter()
    with (
        DocumentWriter(directory) as documents,
        (directory / QUARANTINE).open("wb") as quarantine,
        (directory / UNCOUNTED).open("wb") as uncounted,
    ):
        for item in read_pieces(pieces, Limits(**settings["limits"])):
            if item is None:
                blank += 1
            elif isinstance(item, Malformed):
                bad += 1
                quarantine.write(_line(item))
            else:
                try:
                    record, document = _filter(item, filters, entries)
                except Unfit as unfit:
                    bad += 1
                    quarantine.write(_line(malformed(item.id, 1, str(unfit), item.text.encode("utf-8"))))
                    continue
                if document is not None:
                    record.kept = len(documents)
                    documents.append(document)
                if record.changes or record.kept is None:
                    uncounted.write(_line(record))
    entries[0].seconds = time.perf_counter() - start - sum(entry.seconds for entry in entries[1:])
    return {
        "stages": [entry.model_dump(mode="json") for entry in entries],
        "documents": len(documents),
        "malformed": bad,
        "blank": blank,
    }


def _line(item: Malformed | Uncounted) -> bytes:
    return orjson.dumps(item, option=orjson.OPT_APPEND_NEWLINE)


def difference(before: str, after: str) -> tuple[str, str]:
    """Parts of two texts whose token counts differ by as much as the texts', in any byte-level BPE of GPT-2's kind.

    That expression divides a text where white space follows something else, and what stands on either side does not
    matter to the other; so a text has as many tokens as its pieces between such places. Pieces that are equal in both
    are left out, but for the first: the others follow a line end.
    """
    old, new = before.split("\n"), after.split("\n")
    if len(old) != len(new):
        return before, after
    lines: list[int] = []
    end = 0
    for number in (0, *compress(count(), map(ne, old, new))):
        if number < end:
            continue
        start = number
        while start > end and not _divides(old[start - 1], new[start - 1]):
            start -= 1
        end = number + 1
        while end < len(old) and not _divides(old[end - 1], new[end - 1]):
            end += 1
        lines += range(start, end)
    return "\n".join([old[number] for number in lines]), "\n".join([new[number] for number in lines])


def _divides(before: str, after: str) -> bool:
    """True if the texts are divided at the ends of these lines."""
    return bool(before and after) and not (before[-1].isspace() or after[-1].isspace())


def _filter(
    document: Document, filters: Sequence[TextFilter], entries: Sequence[StageAttrition]
) -> tuple[Uncounted, Document | None]:
    """Apply the filters to a document and enter it in the ledger without its tokens; Unfit enters nothing."""
    outcomes: list[str | Drop] = [document.text]
    for each, entry in zip(filters, entries[1:], strict=True):
        if isinstance(text := outcomes[-1], str):
            start = time.perf_counter()
            outcomes.append(each.apply(text))
            entry.seconds += time.perf_counter() - start
    size = size_bytes(document.text)
    entries[0].enter(size)
    entries[0].keep(size)
    record = Uncounted(0, [])
    for number, (outcome, entry) in enumerate(zip(outcomes[1:], entries[1:], strict=False), 1):
        entry.enter(size)
        record.last = number
        if isinstance(outcome, Drop):
            entry.drop(document, outcome.reason, size)
            record.reason, record.text = outcome.reason, document.text
            return record, None
        if outcome != document.text:
            entry.changed += 1
            record.changes.append((number, *difference(document.text, outcome)))
            document, size = Document(document.id, outcome), size_bytes(outcome)
        entry.keep(size)
    return record, document
