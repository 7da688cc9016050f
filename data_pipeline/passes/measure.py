"""The second pass over a shard: everything the aggregates need to know of its documents, so that none reads texts.

Tokens decide the length and are kept; fingerprints find near-duplicates; matches find test-set text. A shard's long
documents are numbered from 0, and all shards' together are the corpus's numbers.
"""

import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from data_pipeline.config import DeduplicateConfig
from data_pipeline.contamination.decontaminate import count_matches
from data_pipeline.document import Document, Drop, size_bytes
from data_pipeline.duplicates.lsh import fingerprint_words, fingerprints
from data_pipeline.ledger import Amount, Stage
from data_pipeline.passes.prepare import UNCOUNTED, Way
from data_pipeline.text.length import keep_long
from data_pipeline.tokens.token_file import token_dtype
from data_pipeline.tokens.tokenizer import Tokenizer, load_once
from data_pipeline.work.document_shard import DocumentShard
from data_pipeline.work.tasks import Counts, Settings

NUMBERS, SIZES, TOKENS, FINGERPRINTS, MATCHES = (
    "numbers.npy", "sizes.npy", "tokens.bin", "fingerprints.bin", "matches.jsonl",
)  # fmt: skip
BATCH_CHARACTERS = 1 << 20
"""Of so much text one thing is done after the other, so that the tables of each stay in the processor's cache."""


def measure(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Write numbers, sizes and what else is asked for of the documents that are long enough.

    `numbers` [documents] are their places in the shard, `sizes` [documents, 2] their bytes and tokens. Settings:
    `early`, the stages of the first pass; `length`, `deduplicate` and `decontaminate`, sections or None; `test_sets`,
    paths; `tokenizer`, a digest or None. The inputs are the shard and the tokenizer.
    """
    tokenizer = load_once(inputs[1] / "00000", settings["tokenizer"]) if settings["tokenizer"] else None
    dtype = token_dtype(tokenizer.vocab_size) if tokenizer else None
    length, seconds = Stage("length"), _Seconds()
    numbers, sizes, all_tokens = array("q"), array("q"), array("q")
    deduplicate = DeduplicateConfig(**settings["deduplicate"]) if settings["deduplicate"] else None
    search = settings["decontaminate"]
    paths = tuple(map(Path, settings["test_sets"]))
    with (
        (directory / TOKENS).open("wb") as token_file,
        (directory / FINGERPRINTS).open("wb") as fingerprint_file,
        (directory / MATCHES).open("wb") as matches,
    ):
        for batch in _batches(DocumentShard(inputs[0])):
            with seconds.of("length"):
                encoded = [encode(tokenizer, document.text) if tokenizer else None for document in batch]
            kept: list[Document] = []
            for document, ids in zip(batch, encoded, strict=True):
                size, tokens = size_bytes(document.text), 0 if ids is None else len(ids)
                all_tokens.append(tokens)
                if settings["length"]:
                    length.take(size, tokens)
                    outcome = keep_long(document, tokens, settings["length"]["min_tokens"])
                    if isinstance(outcome, Drop):
                        length.drop(document, outcome.reason, size, tokens)
                        continue
                    length.keep(size, tokens)
                if ids is not None:
                    token_file.write(ids.astype(dtype).data)
                numbers.append(len(all_tokens) - 1)
                sizes.extend((size, tokens))
                kept.append(document)
            if deduplicate:
                with seconds.of("deduplicate"):
                    fingerprint_file.write(fingerprints([document.text for document in kept], deduplicate).data)
            if search:
                with seconds.of("decontaminate"):
                    found = [_matches(document, paths, search) for document in kept]
                for number, ngrams in enumerate(found, len(numbers) - len(kept)):
                    if ngrams:
                        row = {"document": number, "ngrams": ngrams}
                        matches.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
    np.save(directory / NUMBERS, np.array(numbers))
    np.save(directory / SIZES, np.array(sizes).reshape(-1, 2))
    length.seconds = seconds.by_stage.pop("length", 0.0)
    stages = _early(settings["early"], inputs[0], all_tokens, tokenizer) if tokenizer else []
    stages += [length] if settings["length"] else []
    return {
        "stages": [asdict(stage) for stage in stages],
        "documents": len(numbers),
        "bytes": sum(sizes[::2]),
        "tokens": sum(sizes[1::2]),
        "seconds": seconds.by_stage,
    }


def encode(tokenizer: Tokenizer, text: str) -> NDArray[np.int32]:
    """Token ids of a text with the end-of-text token appended."""
    return np.concatenate([tokenizer.encode_ids(text), np.array([tokenizer.end_of_text], np.int32)])


def read_fingerprints(directory: Path, config: DeduplicateConfig) -> NDArray[np.uint64]:
    """The fingerprints of a measured shard, [documents, words]."""
    return np.fromfile(directory / FINGERPRINTS, np.uint64).reshape(-1, fingerprint_words(config))


def read_matches(directory: Path) -> Iterator[tuple[int, dict[str, int]]]:
    """Documents of a measured shard with test-set n-grams, and how often they have each."""
    with (directory / MATCHES).open("rb") as file:
        for line in file:
            row = orjson.loads(line)
            yield row["document"], row["ngrams"]


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """The documents in order, a batch ending with the one that makes it BATCH_CHARACTERS long."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    yield batch


def _matches(document: Document, paths: tuple[Path, ...], section: dict[str, Any]) -> dict[str, int]:
    return dict(count_matches(document.text, paths, section["ngram_words"], section["min_ngram_words"]))


def _early(names: list[str], shard: Path, tokens: "array[int]", tokenizer: Tokenizer) -> list[Stage]:
    """The tokens of the stages before there was a tokenizer, from their end backwards."""
    stages = [Stage(name) for name in names]
    plain = sum(tokens)

    def count(text: str) -> int:
        return tokenizer.count_tokens(text) + 1

    with (shard / UNCOUNTED).open("rb") as file:
        for line in file:
            way = Way(**orjson.loads(line))
            if way.kept is None:
                _enter(stages, way, count(way.text), count)
            else:
                plain -= tokens[way.kept]
                _enter(stages, way, tokens[way.kept], count)
    for stage in stages:
        stage.incoming.tokens += plain
        stage.kept.tokens += plain
    return stages


def _enter(stages: list[Stage], way: Way, tokens: int, count: Callable[[str], int]) -> None:
    changes = {number: texts for number, *texts in way.changes}
    for number in range(way.last, -1, -1):
        stage = stages[number]
        if number == way.last and way.kept is None:
            stage.dropped.setdefault(way.reason, Amount()).tokens += tokens
        else:
            stage.kept.tokens += tokens
        if number in changes:
            before, after = changes[number]
            tokens += count(before) - count(after)
        stage.incoming.tokens += tokens


class _Seconds:
    def __init__(self) -> None:
        self.by_stage: dict[str, float] = {}

    @contextmanager
    def of(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.by_stage[stage] = self.by_stage.get(stage, 0.0) + time.perf_counter() - start
