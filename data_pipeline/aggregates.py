"""The two stages that look at all documents at once, run over a document file and entered in the ledger."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from data_pipeline.config import DecontaminateConfig, DeduplicateConfig
from data_pipeline.decontaminate import Ngrams, count_matches, decontaminate
from data_pipeline.deduplicate import find_duplicates
from data_pipeline.document import Document, Drop
from data_pipeline.document_file import DocumentFile
from data_pipeline.ledger import Stage
from data_pipeline.minhash import signature
from data_pipeline.workers import Workers

CountTokens = Callable[[Iterable[str]], Iterator[int]]
"""Tokens of each text, its end-of-text token counted."""


def run_deduplicate(
    stage: Stage, documents: DocumentFile, kept: DocumentFile, config: DeduplicateConfig, workers: Workers
) -> None:
    """Keep the first document of every group of near-duplicates."""
    permutations, characters = config.num_permutations, config.shingle_characters
    sign = partial(signature, num_permutations=permutations, shingle_characters=characters)
    found = find_duplicates(
        workers.map(sign, documents.texts(stage.name)),
        lambda number: documents[number][0].text,
        config.threshold,
        permutations,
        characters,
    )
    drop = Drop("near-duplicate")
    for number, (document, tokens) in enumerate(documents):
        stage.take(document, tokens)
        if found.survivor[number] == number:
            stage.keep(document, tokens)
            kept.append(document, tokens)
        else:
            stage.drop(document, drop, tokens)
    stage.note = (
        f"{found.bands} bands of {found.rows} rows gave {found.candidate_pairs:,} candidate pairs; "
        f"a duplicate has a Jaccard similarity of at least {config.threshold} with another"
    )


def run_decontaminate(
    stage: Stage,
    documents: DocumentFile,
    kept: DocumentFile,
    config: DecontaminateConfig,
    test_sets: dict[str, Path | None],
    workers: Workers,
    count: CountTokens,
) -> None:
    """Cut the text of the test sets out of the documents."""
    paths = tuple(path for path in test_sets.values() if path is not None)
    match = partial(count_matches, paths=paths, words=config.ngram_words, min_words=config.min_ngram_words)
    frequency: Counter[str] = Counter()
    matched: set[int] = set()
    for number, matches in enumerate(workers.map(match, documents.texts(stage.name))):
        if matches:
            matched.add(number)
            frequency.update(matches)
    rare = Ngrams.of(ngram for ngram, times in frequency.items() if times < config.frequent)
    for number, (document, tokens) in enumerate(documents):
        stage.take(document, tokens)
        parts: list[Document] | Drop = [document]
        if number in matched:
            cut = (config.margin_characters, config.min_part_characters, config.max_parts)
            parts = decontaminate(document, rare, *cut)
        if isinstance(parts, Drop):
            stage.drop(document, parts, tokens)
            continue
        changed = parts != [document]
        stage.changed += changed
        counts = count(part.text for part in parts) if changed else iter([tokens])
        for part, part_tokens in zip(parts, counts, strict=True):
            stage.keep(part, part_tokens)
            kept.append(part, part_tokens)
    searched = [name for name, path in test_sets.items() if path is not None]
    missing = [name for name, path in test_sets.items() if path is None]
    stage.note = f"searched for {' and '.join(searched) or 'no test set'}: {len(matched):,} documents matched"
    if common := len(frequency) - len(rare.ngrams):
        stage.note += f"; {common:,} n-grams found {config.frequent} times or more were left in"
    if missing:
        stage.note += f"; NOT searched for {' and '.join(missing)}, which this machine does not have"
