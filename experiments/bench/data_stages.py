"""The stages of the data pipeline, each beside the plain use of the library whose answers it must give."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import ftfy
import numpy as np
from datasketch import MinHashLSH
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend

from data_pipeline.config import DeduplicateConfig
from data_pipeline.contamination.passages import ngrams_of_files
from data_pipeline.contamination.words import indexed_search, reference_search
from data_pipeline.duplicates.lsh import band_keys, buckets, sketch
from data_pipeline.duplicates.near_duplicates import resolve
from data_pipeline.fast.exact_ftfy import fix_text
from data_pipeline.fast.language import detect, detect_reference
from data_pipeline.fast.minhash import as_sketch, reference_signature, signature
from data_pipeline.fast.shingles import jaccard, shingles
from data_pipeline.stages.language import Language
from data_pipeline.tokens.tokenizer import Tokenizer

BATCH = 1000
Signature = NDArray[np.uint32]
Pair = tuple[int, int]


@dataclass(frozen=True)
class Stage:
    """Two functions, of which the second should give the first one's answers."""

    name: str
    library: str
    goal: float | None
    """Times faster than the library that it should be."""
    plain: Callable[..., list[Any]]
    ours: Callable[..., list[Any]]


def cleaning() -> Stage:
    """ftfy with its default settings."""
    return Stage("clean", "ftfy.fix_text", 10, _each(ftfy.fix_text), _each(fix_text("NFC")))


def language() -> Stage:
    """langdetect with a fixed seed and its profiles in a fixed order."""
    return Stage("language", "langdetect", 25, _each(detect_reference), _each(detect))


def in_kept_language(texts: Sequence[str]) -> list[str]:
    """What the default recipe trains a vocabulary on: the cleaned texts in the language that it keeps."""
    cleaned = [text for text in cleaning().ours(texts) if text.strip()]
    detected = language().ours(cleaned)
    return [text for text, spoken in zip(cleaned, detected, strict=True) if spoken == Language().keep]


def encoding(directory: Path) -> Stage:
    """Hugging Face tokenizers on `tokenizer.json` in the directory, a thousand documents at a time, on one thread."""
    tokenizer, backend = Tokenizer.load(directory), Backend.from_file(str(directory / "tokenizer.json"))

    def plain(texts: Sequence[str]) -> list[list[int]]:
        return [
            encoding.ids
            for start in range(0, len(texts), BATCH)
            for encoding in backend.encode_batch(list(texts[start : start + BATCH]), add_special_tokens=False)
        ]

    return Stage("encode", "tokenizers", 5, plain, _each(tokenizer.encode_ids))


def signing(config: DeduplicateConfig) -> Stage:
    """datasketch's MinHash.update_batch over a document's set of shingles."""

    def sign(function: Callable[[str, int, int], Signature]) -> Callable[[Sequence[str]], list[Any]]:
        return _each(lambda text: function(text, config.num_permutations, config.shingle_characters))

    return Stage("signatures", "datasketch update_batch", 10, sign(reference_signature), sign(signature))


def decontamination(test_sets: tuple[Path, ...], words: int, min_words: int) -> Stage:
    """Sets of strings: every match of a test set's n-grams, with its place."""
    ngrams = ngrams_of_files(test_sets, words, min_words)

    def search(function: Callable[..., Any]) -> Callable[[Sequence[str]], list[Any]]:
        return _each(lambda text: list(function((ngrams, text))))

    return Stage("decontaminate", "sets of strings", 12, search(reference_search), search(indexed_search))


def grouping(config: DeduplicateConfig) -> Stage:
    """datasketch's index, which has for each document the earlier ones that share a band with it; our buckets of each
    band. Both of signatures."""

    def plain(signatures: Sequence[Signature]) -> list[Any]:
        index = MinHashLSH(num_perm=config.num_permutations, params=(config.bands, config.rows))
        neighbours = []
        for document, values in enumerate(signatures):
            minhash = as_sketch(values, config.num_permutations)
            neighbours.append(index.query(minhash))
            index.insert(document, minhash, check_duplication=False)
        return neighbours

    def ours(signatures: Sequence[Signature]) -> list[Any]:
        keys = band_keys(np.stack(signatures), config.bands)
        return [buckets(np.ascontiguousarray(keys[:, band])) for band in range(config.bands)]

    return Stage("group", "datasketch MinHashLSH", 30, plain, ours)


def pairs_of_buckets(bands: Sequence[Any]) -> set[Pair]:
    """Every two documents that share a bucket."""
    pairs: set[Pair] = set()
    for documents, starts in bands:
        for start, end in pairwise(starts):
            pairs.update(combinations(map(int, documents[start:end]), 2))
    return pairs


def pairs_of_queries(queries: Sequence[Sequence[int]]) -> set[Pair]:
    """Every document with each earlier one that was found for it."""
    return {(earlier, document) for document, answers in enumerate(queries) for earlier in answers}


def verification(config: DeduplicateConfig) -> Stage:
    """Each document that goes, with the earlier one that is kept for it: by sets of strings from candidate pairs, and
    component by component from fingerprints."""

    def plain(texts: Sequence[str], candidates: set[Pair]) -> list[Pair]:
        earlier: dict[int, list[int]] = defaultdict(list)
        for first, second in sorted(candidates):
            earlier[second].append(first)
        gone: dict[int, int] = {}
        for document in sorted(earlier):
            mine = shingles(texts[document], config.shingle_characters)
            for other in earlier[document]:
                if other in gone:
                    continue
                if jaccard(shingles(texts[other], config.shingle_characters), mine) >= config.threshold:
                    gone[document] = other
                    break
        return list(gone.items())

    def ours(texts: Sequence[str], fingerprints: NDArray[np.uint64], components: NDArray[np.int64]) -> list[Pair]:
        order = np.argsort(components, kind="stable")
        bounds = np.flatnonzero(np.diff(components[order], prepend=-1, append=-1))
        decisions = []
        for start, end in pairwise(bounds):
            if end - start > 1:
                members = order[start:end]
                decision = resolve(members, fingerprints[members], lambda number: texts[number], config)
                decisions += [(each.document, each.survivor) for each in decision.decisions]
        return sorted(decisions)

    return Stage("verify", "sets of strings", None, plain, ours)


def fingerprints_of(signatures: Sequence[Signature], config: DeduplicateConfig) -> NDArray[np.uint64]:
    """Band keys and sketch of each signature."""
    minima = np.stack(signatures)
    return np.concatenate([band_keys(minima, config.bands), sketch(minima)], axis=1)


def _each(function: Callable[[str], Any]) -> Callable[[Sequence[str]], list[Any]]:
    return lambda texts: [function(text) for text in texts]
