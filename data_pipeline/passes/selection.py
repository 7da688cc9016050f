"""Applies the corpus-wide decisions to a shard: duplicates go, test-set text is cut out."""

import math
from array import array
from collections import Counter
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlm_repro.data_pipeline.contamination.decontaminate import decontaminate
from mlm_repro.data_pipeline.contamination.words import Ngrams
from mlm_repro.data_pipeline.document import Drop, json_line, size_bytes
from mlm_repro.data_pipeline.files import StageAttrition
from mlm_repro.data_pipeline.passes.deduplicate import DECISIONS
from mlm_repro.data_pipeline.passes.dropped import drop
from mlm_repro.data_pipeline.passes.measure import NUMBERS, SIZES, TOKENS, encode, read_matches
from mlm_repro.data_pipeline.tokens.token_file import token_dtype
from mlm_repro.data_pipeline.tokens.tokenizer import load_once
from mlm_repro.data_pipeline.work.document_shard import DocumentShard, DocumentWriter
from mlm_repro.data_pipeline.work.tasks import Counts, Settings

PLACES = "places.bin"
RARE = "rare.txt"
LEFT_IN = "left_in.jsonl"


def find_rare_ngrams(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Task: write to `rare.txt`, one a line and sorted, the test sets' n-grams that occur in
    documents that are not duplicates, fewer than `frequent` times in all of them together; all that
    occur there if `frequent` is None. Settings: `counts`, for each shard the number of documents
    that the token filters kept, and `frequent`. Inputs: the folder of the pass `measure`, which has
    all shards, then the folder of the decisions if duplicates were searched for. Returns
    `documents`, the number of documents that are not duplicates and have test-set n-grams, and
    `common`, the number of n-grams that are too frequent and not written."""
    measured, *decisions = inputs
    frequency: Counter[str] = Counter()
    documents = start = 0
    for shard, count in enumerate(settings["counts"]):
        gone = _dropped(decisions, start, count)
        for number, ngrams in read_matches(measured / f"{shard:05d}"):
            if not gone[number]:
                documents += 1
                frequency.update(ngrams)
        start += count
    rare = sorted(
        ngram for ngram, times in frequency.items() if times < (settings["frequent"] or math.inf)
    )
    (directory / RARE).write_text("".join(f"{ngram}\n" for ngram in rare), encoding="utf-8")
    return {"documents": documents, "common": len(frequency) - len(rare)}


def select_documents(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Task: write `places.bin`, the index of a shard's remaining documents, in order; the parts of
    documents that were cut, as a DocumentWriter writes them, and their token ids back to back, in
    the `token_dtype` of the vocabulary, in `tokens.bin`; and `left_in.jsonl`, a line for each
    document or part that still holds n-grams too frequent to be cut out, with its `id` and the
    `share` of its characters, from 0 to 1, that they cover.

    The index, int64 [documents, 6], locates each document or part, so that a slice reads no more of
    a shard than its own documents: 1 for a part, 0 for a whole document; start and end of its line,
    in bytes; start and end of its tokens, in tokens; the bytes of its text. Lines and tokens of
    parts are in the files that are written here, the others in the inputs' files.

    Settings: `is_written` (False if the shard is only compared with, and all that is written is an
    empty `left_in.jsonl`), `start` (the shard's first number in the corpus), `count` (its documents
    after the token filters), `deduplicate` (True if it was done), `decontaminate` (section or
    None), `tokenizer` (digest or None), `keep_dropped` (True if dropped documents are written too,
    to `dropped.jsonl`).
    Inputs: the shard's folder after the pass `prepare`, then after `measure`, then the folders of
    the decisions, the n-grams and the tokenizer, as far as the recipe has them. Returns `stages`,
    the stages' ledger entries, the number of remaining `documents`, where each part counts, and
    `left_in`, the number of lines in `left_in.jsonl`; without `is_written`, an empty list and
    zeros.
    """
    prepared, measured, *more = inputs
    section = settings["decontaminate"]
    if not settings["is_written"]:
        (directory / LEFT_IN).touch()
        return {"stages": [], "documents": 0, "left_in": 0}
    decisions = [more.pop(0)] if settings["deduplicate"] else []
    rare = more.pop(0) / "00000" / RARE if section else None
    tokenizer = (
        load_once(more.pop(0) / "00000", settings["tokenizer"]) if settings["tokenizer"] else None
    )
    documents = DocumentShard(prepared)
    numbers = np.load(measured / NUMBERS)
    sizes = np.load(measured / SIZES)
    gone = _dropped(decisions, settings["start"], settings["count"])
    deduplicate = StageAttrition.begin("deduplicate")
    cut = StageAttrition.begin("decontaminate")
    folder = directory if settings.get("keep_dropped") else None
    for number in np.flatnonzero(gone):
        drop(
            folder,
            deduplicate,
            documents[int(numbers[number])],
            "near-duplicate",
            *map(int, sizes[number]),
        )
    for count, these in ((deduplicate.enter, sizes), (deduplicate.keep, sizes[~gone])):
        size, tokens = these.sum(0).tolist()
        count(size, tokens, len(these))
    matched = dict(read_matches(measured)) if section else {}
    ngrams = _ngrams_of(rare.read_text(encoding="utf-8") if rare else "")
    test_text = 0
    index = array("q")
    tokens_before = np.cumsum(np.append(0, sizes[:, 1]))
    encoded = 0
    with (
        DocumentWriter(directory) as parts,
        (directory / TOKENS).open("wb") as token_file,
        (directory / LEFT_IN).open("wb") as left_in,
    ):
        for number in np.flatnonzero(~gone):
            size, tokens = map(int, sizes[number])
            remains = None
            if number in matched:
                document = documents[int(numbers[number])]
                remains = decontaminate(
                    document,
                    ngrams,
                    section["margin_characters"],
                    section["min_part_characters"],
                    section["max_parts"],
                )
            cut.enter(size, tokens)
            for part in remains if isinstance(remains, list) else ():
                others = Ngrams.of(matched[int(number)].keys() - ngrams.ngrams)
                if share := _share(part.text, others):
                    test_text += 1
                    row = {"id": part.id, "share": round(share, 4)}
                    left_in.write(json_line(row))
            if remains is None or remains == [document]:
                line = documents.starts[numbers[number] : numbers[number] + 2].tolist()
                index.extend((0, *line, *tokens_before[number : number + 2].tolist(), size))
                cut.keep(size, tokens)
                continue
            if isinstance(remains, Drop):
                drop(folder, cut, document, remains.reason, size, tokens)
                continue
            cut.changed += 1
            for part in remains:
                ids = encode(tokenizer, part.text) if tokenizer else np.empty(0, np.int32)
                if tokenizer:
                    token_file.write(ids.astype(token_dtype(tokenizer.vocab_size)).tobytes())
                before = parts.end
                parts.append(part)
                index.extend(
                    (1, before, parts.end, encoded, encoded + len(ids), size_bytes(part.text))
                )
                encoded += len(ids)
                cut.keep(index[-1], len(ids))
    (directory / PLACES).write_bytes(index)
    ledger = ((deduplicate, settings["deduplicate"]), (cut, section))
    stages = [entry.model_dump(mode="json") for entry, is_run in ledger if is_run]
    return {"stages": stages, "documents": cut.documents_out, "left_in": test_text}


@lru_cache(maxsize=1)
def _ngrams_of(lines: str) -> Ngrams:
    """Return an Ngrams of the n-grams in `lines`, a text with one on each line, the last line too
    with a newline at its end; of none if the text is empty. The last result is kept, because all
    shards of a corpus are searched for the same n-grams."""
    return Ngrams.of(lines.split("\n")[:-1])


def _share(text: str, ngrams: Ngrams) -> float:
    """Return about the share, from 0 to 1, of a text's characters that the matches of `ngrams`, an
    Ngrams, cover; a character that several cover counts once. A match counts as long as its n-gram,
    whose words have one space between them. 0 for a text that is empty or has no match."""
    covered = end = 0
    for start, ngram in ngrams.matches(text):
        covered += max(0, start + len(ngram) - max(start, end))
        end = max(end, start + len(ngram))
    return covered / max(1, len(text))


def _dropped(decisions: list[Path], start: int, count: int) -> NDArray[np.bool_]:
    """Return a boolean array [count], True for each document that is dropped as a duplicate, of the
    `count` documents of the corpus from number `start` on. `decisions` is a list of one folder,
    below which `00000/decisions.npy` has a record for each dropped document of the corpus, in the
    order of their numbers, the field `document`; or an empty list if no duplicates were searched
    for, so that every value is False."""
    gone = np.zeros(count, bool)
    for folder in decisions:
        documents = np.load(folder / "00000" / DECISIONS, mmap_mode="r")["document"]
        first, last = np.searchsorted(documents, [start, start + count])
        gone[documents[first:last] - start] = True
    return gone
