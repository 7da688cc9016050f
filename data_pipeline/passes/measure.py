"""The second pass over a shard. It measures everything that corpus-wide decisions need, so that the
decisions read no texts.

Tokens decide the length and are kept; fingerprints find near-duplicates; matches find test-set
text. The documents that the token filters keep are numbered from 0 in a shard, and through all
shards in the corpus.
"""

import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import count
from pathlib import Path

import numpy as np
import orjson

from mlm_repro.data_pipeline.arrays import Integers32
from mlm_repro.data_pipeline.contamination.decontaminate import ngrams_of_files
from mlm_repro.data_pipeline.document import Document, json_line, size_bytes
from mlm_repro.data_pipeline.duplicates.lsh import fingerprints
from mlm_repro.data_pipeline.fast.shingles import as_bytes
from mlm_repro.data_pipeline.files import StageAttrition
from mlm_repro.data_pipeline.passes.dropped import drop
from mlm_repro.data_pipeline.stages import TOKEN_FILTERS
from mlm_repro.data_pipeline.stages.deduplicate import DeduplicateConfig
from mlm_repro.data_pipeline.stages.stage import TokenFilter
from mlm_repro.data_pipeline.tokens.token_file import token_dtype
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer, load_once
from mlm_repro.data_pipeline.work.document_shard import DocumentShard
from mlm_repro.data_pipeline.work.tasks import Counts, Settings

NUMBERS = "numbers.npy"
SIZES = "sizes.npy"
TOKENS = "tokens.bin"
FINGERPRINTS = "fingerprints.bin"
DIGESTS = "digests.bin"
MATCHES = "matches.jsonl"
BATCH_CHARACTERS = 1 << 20
"""Number of characters that are encoded, hashed and searched at a time, so that the tables stay in
the processor's cache."""
DOCUMENT_CHARACTERS = 64
"""Smallest number of characters that a document counts for in a batch, so that empty documents do
not fill the memory."""


def measure(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Task: for each document of a shard that the token filters keep, write its index, its sizes,
    its token ids and the requested measurements. Each of these has a file of its own, for all
    documents; the file of something that was not asked for is empty.

    The measurements are MinHash fingerprints with text digests, and counts of test-set n-grams in
    the documents that have any, which are numbered from 0 among the kept ones. `numbers.npy`
    [documents] has indices in the shard, `sizes.npy` [documents, 2] bytes and tokens, which are 0
    without a tokenizer. `tokens.bin` has the ids of all documents back to back, in the
    `token_dtype` of the tokenizer's vocabulary; `fingerprints.bin` the rows of `fingerprints`,
    uint64; `digests.bin` 16 bytes for each document; `read_matches` reads `matches.jsonl`.

    Settings: `filters`, pairs of a TokenFilter's name and its section of the recipe; `deduplicate`
    and `decontaminate`, the keys of their sections that change the result, or None; `test_sets`,
    paths; `tokenizer`, a digest or None; `keep_dropped`, True if dropped documents are written too.
    The inputs are the shard and the tokenizer. Returns `stages`, the filters' ledger entries; the
    numbers of `documents`, `bytes` and `tokens` that are kept; and `seconds`, by `tokens`,
    `deduplicate` and `decontaminate` where done. Raises BadInput if a test set cannot be read, and
    the errors of `Tokenizer.load`.
    """
    tokenizer = (
        load_once(inputs[1] / "00000", settings["tokenizer"]) if settings["tokenizer"] else None
    )
    dtype = token_dtype(tokenizer.vocab_size) if tokenizer else None
    filters = [TOKEN_FILTERS[name](**section) for name, section in settings["filters"]]
    entries = [StageAttrition.begin(token_filter.name) for token_filter in filters]
    seconds = defaultdict[str, float](float)
    numbers = array("q")
    sizes = array("q")
    indices = count()
    folder = directory if settings.get("keep_dropped") else None
    deduplicate = DeduplicateConfig(**settings["deduplicate"]) if settings["deduplicate"] else None
    search = settings["decontaminate"]
    paths = tuple(map(Path, settings["test_sets"]))
    with (
        (directory / TOKENS).open("wb") as token_file,
        (directory / FINGERPRINTS).open("wb") as fingerprint_file,
        (directory / DIGESTS).open("wb") as digests,
        (directory / MATCHES).open("wb") as matches,
    ):
        for batch in _batches(DocumentShard(inputs[0])):
            with _timed(seconds, "tokens"):
                encoded = [
                    encode(tokenizer, document.text) if tokenizer else None for document in batch
                ]
            long = []
            for document, ids in zip(batch, encoded, strict=True):
                # One counter runs over all batches. Numbers that began anew in each batch once made
                # duplicates be judged, and texts kept, by the wrong document.
                index = next(indices)
                size = size_bytes(document.text)
                tokens = 0 if ids is None else len(ids)
                if not _is_kept(document, size, tokens, filters, entries, folder):
                    continue
                if ids is not None:
                    token_file.write(ids.astype(dtype).data)
                numbers.append(index)
                sizes.extend((size, tokens))
                long.append(document)
            if deduplicate:
                with _timed(seconds, "deduplicate"):
                    fingerprint_file.write(
                        fingerprints([document.text for document in long], deduplicate).data
                    )
                    digests.writelines(
                        blake2b(as_bytes(document.text).data, digest_size=16).digest()
                        for document in long
                    )
            if search:
                with _timed(seconds, "decontaminate"):
                    sought = ngrams_of_files(
                        paths, search["ngram_words"], search["min_ngram_words"]
                    )
                    matching = [
                        Counter(ngram for _, ngram in sought.matches(document.text))
                        for document in long
                    ]
                for number, ngrams in enumerate(matching, len(numbers) - len(long)):
                    if ngrams:
                        row = {"document": number, "ngrams": dict(ngrams)}
                        matches.write(json_line(row))
    np.save(directory / NUMBERS, np.array(numbers))
    np.save(directory / SIZES, np.array(sizes).reshape(-1, 2))
    for entry in entries[:1]:
        entry.seconds = seconds["tokens"]
    return {
        "stages": [entry.model_dump(mode="json") for entry in entries],
        "documents": len(numbers),
        "bytes": sum(sizes[::2]),
        "tokens": sum(sizes[1::2]),
        "seconds": seconds,
    }


def encode(tokenizer: Tokenizer, text: str) -> Integers32:
    """Return the token ids of a text by `tokenizer`, with the id of its end-of-text token appended,
    as an int32 array [tokens]."""
    return np.concatenate([tokenizer.encode_ids(text), np.array([tokenizer.end_of_text], np.int32)])


def read_matches(directory: Path) -> Iterator[tuple[int, dict[str, int]]]:
    """Yield a pair for each document of a measured shard that has test-set n-grams, in order: its
    number, counted from 0 among the documents of the shard that the token filters kept, and a dict
    n-gram → how often the document has it. `directory` is the shard's."""
    with (directory / MATCHES).open("rb") as file:
        for line in file:
            row = orjson.loads(line)
            yield row["document"], row["ngrams"]


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield lists of documents, in order; a list ends with the document that brings it to
    BATCH_CHARACTERS, where each counts as DOCUMENT_CHARACTERS at least. The last may be empty."""
    batch = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += max(DOCUMENT_CHARACTERS, len(document.text))
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch = []
            characters = 0
    yield batch


def _is_kept(
    document: Document,
    size: int,
    tokens: int,
    filters: Sequence[TokenFilter],
    entries: Sequence[StageAttrition],
    folder: Path | None,
) -> bool:
    """Apply the filters to a document, and count it in the ledger entry of each, up to the filter
    that drops it. Return True if none drops it. With a `folder`, a dropped document is appended to
    `dropped.jsonl` there. `size` and `tokens` are the document's bytes and tokens; `entries[n]`
    belongs to `filters[n]`."""
    for token_filter, entry in zip(filters, entries, strict=True):
        entry.enter(size, tokens)
        if outcome := token_filter.apply(document.text, tokens):
            drop(folder, entry, document, outcome.reason, size, tokens)
            return False
        entry.keep(size, tokens)
    return True


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[stage] += time.perf_counter() - start
