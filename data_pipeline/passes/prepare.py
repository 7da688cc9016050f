"""The first pass over a shard: reads documents and applies the stages that need only their text."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from time import perf_counter

from mlm_repro.data_pipeline.document import Document, Drop, Malformed, Unfit, json_line, size_bytes
from mlm_repro.data_pipeline.files import StageAttrition
from mlm_repro.data_pipeline.passes.dropped import drop
from mlm_repro.data_pipeline.reading.readers import malformed, read_sound
from mlm_repro.data_pipeline.stages import TEXT_FILTERS
from mlm_repro.data_pipeline.stages.stage import SOURCE, TextFilter
from mlm_repro.data_pipeline.tokens.token_file import join_files
from mlm_repro.data_pipeline.work.document_shard import DocumentWriter
from mlm_repro.data_pipeline.work.tasks import Counts, Settings

QUARANTINE = "quarantine.jsonl"


def prepare(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Task: write to `directory` the documents that the text filters keep, as a DocumentShard, and
    to its `quarantine.jsonl` the malformed input and the texts that a filter cannot treat in
    reasonable time. `inputs` is not used: `pieces` name the input.

    Settings: `pieces`, `max_line_bytes`, `goes_on` (True if the rest of a damaged file is skipped),
    `filters`: pairs of a TextFilter's name and its section of the recipe, and `keep_dropped` (True
    if dropped documents are appended to `dropped.jsonl` there). Returns `stages`, the ledger
    entries of the source and the filters; the numbers of `documents` that are kept, of `malformed`
    lines, rows and such texts, and of `blank` lines; and `damaged`, a sentence on each damaged
    file. Without `goes_on`, Damaged is raised for such a file; the other errors of `read_pieces`
    always are.
    """
    filters = [TEXT_FILTERS[name](**section) for name, section in settings["filters"]]
    folder = directory if settings.get("keep_dropped") else None
    entries = [
        StageAttrition.begin(name)
        for name in (SOURCE, *(text_filter.name for text_filter in filters))
    ]
    bad = blank = 0
    damaged: list[str] = []

    def set_aside(item: Malformed) -> None:
        nonlocal bad
        bad += item.line > 0  # a damaged file is reported as line 0 and is not a malformed line
        quarantine.write(json_line(item))

    start = perf_counter()
    with DocumentWriter(directory) as documents, (directory / QUARANTINE).open("wb") as quarantine:
        for item in read_sound(
            settings["pieces"], settings["max_line_bytes"], settings["goes_on"], damaged
        ):
            if item is None:
                blank += 1
            elif isinstance(item, Malformed):
                set_aside(item)
            else:
                try:
                    document = _filter(item, filters, entries, folder)
                except Unfit as unfit:
                    set_aside(malformed(item.id, 1, str(unfit), item.text.encode("utf-8")))
                    continue
                if document is not None:
                    documents.append(document)
    entries[0].seconds = perf_counter() - start - sum(entry.seconds for entry in entries[1:])
    return {
        "stages": [entry.model_dump(mode="json") for entry in entries],
        "documents": len(documents),
        "malformed": bad,
        "blank": blank,
        "damaged": damaged,
    }


def join_lists(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Task: write one file, `name` in the task's directory: the files of that name of every stage
    in `inputs`, stage by stage and in each by shard, from 0 to `shards` - 1. Missing files are
    skipped. Returns no counts."""
    stages_and_shards = product(inputs, range(settings["shards"]))
    paths = (stage / f"{n:05d}" / settings["name"] for stage, n in stages_and_shards)
    with (directory / settings["name"]).open("wb") as joined:
        join_files(filter(Path.is_file, paths), joined)
    return {}


def _filter(
    document: Document,
    filters: Sequence[TextFilter],
    entries: Sequence[StageAttrition],
    folder: Path | None,
) -> Document | None:
    """Apply the filters in turn to a document, and count it and its bytes, but no tokens, in the
    ledger entries; the first entry is the source's, the others belong to the filters in order.
    Return the document that comes out, or None if a filter drops it. With a `folder`, a dropped
    document is appended to `dropped.jsonl` there. If a filter raises Unfit, nothing is counted, and
    the error is passed on."""
    # All filters run before anything is counted, because Unfit must leave the ledger as it was.
    outcomes: list[str | Drop] = [document.text]
    for text_filter, entry in zip(filters, entries[1:], strict=True):
        if isinstance(text := outcomes[-1], str):
            start = perf_counter()
            outcomes.append(text_filter.apply(text))
            entry.seconds += perf_counter() - start
    size = size_bytes(document.text)
    entries[0].enter(size)
    entries[0].keep(size)
    for outcome, entry in zip(outcomes[1:], entries[1:], strict=False):
        entry.enter(size)
        if isinstance(outcome, Drop):
            drop(folder, entry, document, outcome.reason, size)
            return None
        if outcome != document.text:
            entry.changed += 1
            document = replace(document, text=outcome)
            size = size_bytes(outcome)
        entry.keep(size)
    return document
