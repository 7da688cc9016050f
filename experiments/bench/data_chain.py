"""The stages of the data pipeline one after the other, each beside its library, on what the one before it kept."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import ftfy
import numpy as np
from datasketch import MinHashLSH
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend

from data_pipeline.config import DataConfig, DeduplicateConfig
from data_pipeline.contamination.decontaminate import decontaminate, ngrams_of_files
from data_pipeline.contamination.testsets import find_gpt2_vocabulary
from data_pipeline.contamination.words import Ngrams, indexed_search, reference_search
from data_pipeline.document import Document, Drop
from data_pipeline.duplicates.components import components
from data_pipeline.duplicates.lsh import band_keys, buckets, sketch
from data_pipeline.duplicates.near_duplicates import resolve
from data_pipeline.fast.exact_ftfy import fix_text
from data_pipeline.fast.language import detect, detect_reference
from data_pipeline.fast.minhash import as_sketch, reference_signature, signature
from data_pipeline.fast.shingles import jaccard, shingles
from data_pipeline.stages.language import Language
from data_pipeline.stages.length import Length
from data_pipeline.tokens.tokenizer import Tokenizer
from experiments.bench.data_whole import FASTER, HOURS, OURS, PLAIN, SECONDS, answers, core_hours
from experiments.bench.timing import cpu_seconds, rounded, series
from lineage.benchmark import Case, Ratio
from lineage.errors import BadInput, DataMissing
from lineage.progress import Progress

BATCH = 1000
Signature = NDArray[np.uint32]
Pair = tuple[int, int]
BLOCKS = 12
REPEATS = 3
TRAINED_SIZES = (8192, 4096, 2048, 1024, 512, 257)
"""Tokens of a vocabulary that is trained where GPT-2's is not here; any text gives the last, which is the bytes."""
Taken = dict[str, list[tuple[float, Any]]]
"""Of plain and ours: processor seconds and answer of each block or repeat."""


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


class Vocabulary(NamedTuple):
    """A tokenizer, the recipe sections that make it for a corpus and for any few documents, and what it is."""

    tokenizer: Tokenizer
    recipe: str
    recipe_of_few: str
    description: str


def choose_vocabulary(texts: Sequence[str]) -> Vocabulary:
    """GPT-2's or, where it is not here, the largest of `TRAINED_SIZES` that `mlm-data run` can train on the texts."""
    try:
        gpt2 = Tokenizer.from_gpt2_files(*find_gpt2_vocabulary())
        return Vocabulary(gpt2, 'kind = "gpt2"', 'kind = "gpt2"', "GPT-2's")
    except DataMissing:
        training = in_kept_language(texts)
        section = 'kind = "train"\nvocab_size = {}'.format
        for size in TRAINED_SIZES:
            with suppress(BadInput):
                trained = Tokenizer.train(training, size)
                what = f"{size:,} tokens, trained by the whole run, as GPT-2's vocabulary is not here"
                return Vocabulary(trained, section(size), section(TRAINED_SIZES[-1]), what)
        raise


def size_bytes(texts: Sequence[str]) -> int:
    """UTF-8 bytes of all texts."""
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)


def summarize(
    stage: Stage, texts: Sequence[str], taken: Taken, compared: int, differing: int, repeats: int = 1
) -> Case:
    """One stage, from what was taken block by block or repeat by repeat."""
    megabytes = size_bytes(texts) / 1e6
    plain, ours = ([seconds for seconds, _ in taken[name]] for name in (PLAIN, OURS))
    blocks = [a / b for a, b in zip(plain, ours, strict=True) if b]
    faster = Ratio(name=FASTER, value=rounded(sum(plain) / sum(ours)), rounds=[*map(rounded, blocks)], goal=stage.goal)
    return Case(
        name=f"{stage.name} beside {stage.library}",
        series=[
            series(OURS, "time", SECONDS, sum(ours) / repeats),
            series(PLAIN, "time", SECONDS, sum(plain) / repeats),
            series(OURS, "throughput", "MB/s", megabytes * repeats / sum(ours)),
            series(OURS, HOURS, "core-hours", core_hours(sum(ours) / repeats, megabytes)),
            *answers(compared, differing),
        ],
        ratios=[faster],
        setting={"stage": stage.name, "documents": len(texts), "megabytes": round(megabytes, 3)},
    )


def measure_stage(stage: Stage, texts: Sequence[str]) -> tuple[Case, list[Any]]:
    """Both functions on the same blocks of documents in turn; the case and our answers."""
    stage.plain(texts[:1]), stage.ours(texts[:1])  # loads tables and compiles
    bounds = np.linspace(0, len(texts), min(BLOCKS, len(texts)) + 1).astype(int)
    blocks = [((texts[start:end],),) * 2 for start, end in pairwise(bounds)]
    taken = _in_turn(stage, blocks)
    expected, answers = ([answer for _, block in taken[name] for answer in block] for name in (PLAIN, OURS))
    differing = sum(not np.array_equal(left, right) for left, right in zip(expected, answers, strict=True))
    return summarize(stage, texts, taken, len(texts), differing), answers


def measure_stages(
    texts: Sequence[str], tokenizer: Path, test_sets: tuple[Path, ...], config: DataConfig
) -> tuple[list[Case], Counter[str]]:
    """A row for each stage, every stage on the documents that the one before it kept; what is left at the end.

    Raises BadInput for a corpus of which nothing is left on the way.
    """
    rows: list[Case] = []

    def run(stage: Stage, documents: Sequence[str]) -> list[Any]:
        if len(documents) < 2:
            raise BadInput(f"too little of the corpus is left for the stage {stage.name}: {len(documents)} documents")
        answer, answers = measure_stage(stage, documents)
        rows.append(answer)
        return answers

    duplicates, contamination = config.deduplicate, config.decontaminate
    cleaned = [text for text in run(cleaning(), texts) if text.strip()]
    languages = run(language(), cleaned)
    spoken = [text for text, answer in zip(cleaned, languages, strict=True) if answer == Language().keep]
    tokens = run(encoding(tokenizer), spoken)
    enough = Length().min_tokens
    long = [text for text, ids in zip(spoken, tokens, strict=True) if len(ids) + 1 >= enough]
    signatures = run(signing(duplicates), long)
    group = grouping(duplicates)
    group.ours(signatures[:2])
    taken = _in_turn(group, [((signatures,),) * 2] * REPEATS)
    candidates, pairs = pairs_of_queries(taken[PLAIN][-1][1]), pairs_of_buckets(taken[OURS][-1][1])
    rows.append(summarize(group, long, taken, len(candidates), len(candidates ^ pairs), REPEATS))
    verify = verification(duplicates)
    fingerprints = fingerprints_of(signatures, duplicates)
    bands = (np.ascontiguousarray(fingerprints[:, band]) for band in range(duplicates.bands))
    labels = components(bands, np.ascontiguousarray(fingerprints[:, duplicates.bands :]), duplicates)
    verify.ours(long[:2], fingerprints[:2], np.zeros(2, np.int64))
    taken = _in_turn(verify, [((long, candidates), (long, fingerprints, labels))])
    expected, decided = (set(taken[name][0][1]) for name in (PLAIN, OURS))
    rows.append(summarize(verify, long, taken, len(expected), len(expected ^ decided)))
    gone = {document for document, _ in decided}
    kept = [text for number, text in enumerate(long) if number not in gone]
    if test_sets:
        sizes = (contamination.ngram_words, contamination.min_ngram_words)
        matches = run(decontamination(test_sets, *sizes), kept)
    else:
        matches = [[] for _ in kept]
    frequency = Counter(ngram for answer in matches for _, ngram in answer)
    rare = Ngrams.of(ngram for ngram, times in frequency.items() if times < contamination.frequent)
    parts = [decontaminate(Document("", text), rare) if answer else [Document("", text)]
             for text, answer in zip(kept, matches, strict=True)]  # fmt: skip
    return rows, Counter(part.text for each in parts if not isinstance(each, Drop) for part in each)


def _in_turn(stage: Stage, blocks: Sequence[tuple[tuple[Any, ...], tuple[Any, ...]]]) -> Taken:
    """The plain function and ours, each on its arguments of every block or repeat."""
    taken: Taken = {PLAIN: [], OURS: []}
    with Progress(stage.name, len(blocks), "blocks") as progress:
        for plain, ours in blocks:
            taken[PLAIN].append(cpu_seconds(stage.plain, *plain))
            taken[OURS].append(cpu_seconds(stage.ours, *ours))
            progress.advance()
    return taken
