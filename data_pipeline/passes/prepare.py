"""The first pass over a shard: documents out of the input, through the stages that need only their text."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import compress, count
from operator import ne
from pathlib import Path
from typing import Any

import orjson

from data_pipeline.document import Document, Drop, Malformed, size_bytes
from data_pipeline.ledger import Stage
from data_pipeline.reading.pieces import Piece
from data_pipeline.reading.readers import Limits, read_pieces
from data_pipeline.text.clean import clean
from data_pipeline.text.language import keep_language
from data_pipeline.work.document_shard import DocumentWriter
from data_pipeline.work.tasks import Counts, Settings

QUARANTINE, UNCOUNTED = "quarantine.jsonl", "uncounted.jsonl"

Judge = Callable[[Document], Document | Drop]

JUDGES: dict[str, Callable[[dict[str, Any]], Judge]] = {
    "clean": lambda section: partial(clean, normalization=section["normalization"]),
    "language": lambda section: partial(keep_language, code=section["keep"]),
}
"""The stages that judge a document by its text alone, made from their section of the configuration."""


@dataclass
class Way:
    """A document's way through the first pass, kept until there is a tokenizer to count its texts with."""

    last: int
    """Number of the last stage it came to, the source being 0."""
    changes: list[tuple[int, str, str]]
    """Stages that changed it, with the `difference` of its texts before and after."""
    kept: int | None = None
    """Its number among the shard's documents, if it is kept."""
    reason: str = ""
    text: str = ""
    """Why the last stage dropped it, and its text then."""


def prepare(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Write a shard's documents that are kept, what is no document, and what was changed or dropped.

    Settings: `pieces`, `limits`, and `judges`: pairs of a stage and its section of the configuration.
    """
    judges = [JUDGES[name](section) for name, section in settings["judges"]]
    stages = [Stage("source"), *(Stage(name) for name, _ in settings["judges"])]
    pieces = [Piece(**piece) for piece in settings["pieces"]]
    malformed = blank = 0
    start = time.perf_counter()
    with (
        DocumentWriter(directory) as documents,
        (directory / QUARANTINE).open("wb") as quarantine,
        (directory / UNCOUNTED).open("wb") as uncounted,
    ):
        for found in read_pieces(pieces, Limits(**settings["limits"])):
            if found is None:
                blank += 1
            elif isinstance(found, Malformed):
                malformed += 1
                quarantine.write(orjson.dumps(found, option=orjson.OPT_APPEND_NEWLINE))
            else:
                way, document = _follow(found, judges, stages)
                if document is not None:
                    way.kept = len(documents)
                    documents.append(document)
                if way.changes or way.kept is None:
                    uncounted.write(orjson.dumps(way, option=orjson.OPT_APPEND_NEWLINE))
        kept = len(documents)
    stages[0].seconds = time.perf_counter() - start - sum(stage.seconds for stage in stages[1:])
    return {
        "stages": [asdict(stage) for stage in stages],
        "documents": kept,
        "malformed": malformed,
        "blank": blank,
    }


def difference(before: str, after: str) -> tuple[str, str]:
    """Parts of two texts that differ by as many tokens as the texts, in any byte-level BPE with GPT-2's expression.

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
    """Whether the texts are divided at the ends of these lines."""
    return bool(before and after) and not (before[-1].isspace() or after[-1].isspace())


def _follow(document: Document, judges: Sequence[Judge], stages: Sequence[Stage]) -> tuple[Way, Document | None]:
    """Judge a document and enter it in the stages, without its tokens."""
    size = size_bytes(document.text)
    stages[0].take(size)
    stages[0].keep(size)
    way = Way(0, [])
    for number, judge in enumerate(judges, 1):
        stage = stages[number]
        start = time.perf_counter()
        outcome = judge(document)
        stage.seconds += time.perf_counter() - start
        stage.take(size)
        way.last = number
        if isinstance(outcome, Drop):
            stage.drop(document, outcome.reason, size)
            way.reason, way.text = outcome.reason, document.text
            return way, None
        if outcome.text != document.text:
            stage.changed += 1
            way.changes.append((number, *difference(document.text, outcome.text)))
            size = size_bytes(outcome.text)
        stage.keep(size)
        document = outcome
    return way, document
