"""The stages of the data pipeline one after the other, each beside its library, on what the one before it kept."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_pipeline.config import DataConfig
from data_pipeline.contamination.decontaminate import decontaminate
from data_pipeline.contamination.testsets import find_gpt2_vocabulary
from data_pipeline.contamination.words import Ngrams
from data_pipeline.document import Document, Drop
from data_pipeline.duplicates.components import components
from data_pipeline.stages.language import Language
from data_pipeline.stages.length import Length
from data_pipeline.tokens.tokenizer import Tokenizer
from experiments.bench import data_stages as stages
from experiments.bench.data_stages import Stage
from experiments.bench.data_whole import FASTER, HOURS, OURS, PLAIN, SECONDS, answers, core_hours
from experiments.bench.timing import cpu_seconds, in_turn, rounded, series
from lineage.benchmark import Case, Ratio
from lineage.errors import BadInput, DataMissing
from lineage.progress import Progress

BLOCKS = 12
REPEATS = 3
TRAINED_SIZES = (8192, 4096, 2048, 1024, 512, 257)
"""Tokens of a vocabulary that is trained where GPT-2's is not here; any text gives the last, which is the bytes."""
Taken = dict[str, list[tuple[float, Any]]]
"""Of plain and ours: processor seconds and answer of each block or repeat."""


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
        training = stages.in_kept_language(texts)
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
    taken: Taken = {PLAIN: [], OURS: []}
    stage.plain(texts[:1]), stage.ours(texts[:1])  # loads tables and compiles
    bounds = np.linspace(0, len(texts), min(BLOCKS, len(texts)) + 1).astype(int)
    with Progress(stage.name, len(texts), "documents") as progress:
        for start, end in pairwise(bounds):
            for name, function in ((PLAIN, stage.plain), (OURS, stage.ours)):
                taken[name].append(cpu_seconds(function, texts[start:end]))
            progress.advance(int(end - start))
    expected, answers = ([answer for _, block in taken[name] for answer in block] for name in (PLAIN, OURS))
    differing = sum(not np.array_equal(left, right) for left, right in zip(expected, answers, strict=True))
    return summarize(stage, texts, taken, len(texts), differing), answers


@dataclass(frozen=True)
class Chain:
    """What the stages did, one after the other."""

    cases: list[Case]
    texts: Counter[str]
    """What is left at the end."""


def measure_stages(texts: Sequence[str], tokenizer: Path, test_sets: tuple[Path, ...], config: DataConfig) -> Chain:
    """A row for each stage, every stage on the documents that the one before it kept.

    Raises BadInput for a corpus of which nothing is left on the way.
    """
    rows = []

    def run(stage: Stage, documents: Sequence[str]) -> list[Any]:
        if len(documents) < 2:
            raise BadInput(f"too little of the corpus is left for the stage {stage.name}: {len(documents)} documents")
        answer, answers = measure_stage(stage, documents)
        rows.append(answer)
        return answers

    duplicates, contamination = config.deduplicate, config.decontaminate
    cleaned = [text for text in run(stages.cleaning(), texts) if text.strip()]
    languages = run(stages.language(), cleaned)
    spoken = [text for text, answer in zip(cleaned, languages, strict=True) if answer == Language().keep]
    tokens = run(stages.encoding(tokenizer), spoken)
    enough = Length().min_tokens
    long = [text for text, ids in zip(spoken, tokens, strict=True) if len(ids) + 1 >= enough]
    signatures = run(stages.signing(duplicates), long)
    group = stages.grouping(duplicates)
    group.ours(signatures[:2])
    taken = _measure_whole(group, REPEATS, (signatures,), (signatures,))
    candidates, pairs = stages.pairs_of_queries(taken[PLAIN][-1][1]), stages.pairs_of_buckets(taken[OURS][-1][1])
    rows.append(summarize(group, long, taken, len(candidates), len(candidates ^ pairs), REPEATS))
    verify = stages.verification(duplicates)
    fingerprints = stages.fingerprints_of(signatures, duplicates)
    bands = (np.ascontiguousarray(fingerprints[:, band]) for band in range(duplicates.bands))
    labels = components(bands, np.ascontiguousarray(fingerprints[:, duplicates.bands :]), duplicates)
    verify.ours(long[:2], fingerprints[:2], np.zeros(2, np.int64))
    taken = _measure_whole(verify, 1, (long, candidates), (long, fingerprints, labels))
    expected, decided = (set(taken[name][0][1]) for name in (PLAIN, OURS))
    rows.append(summarize(verify, long, taken, len(expected), len(expected ^ decided)))
    gone = {document for document, _ in decided}
    kept = [text for number, text in enumerate(long) if number not in gone]
    if test_sets:
        sizes = (contamination.ngram_words, contamination.min_ngram_words)
        matches = run(stages.decontamination(test_sets, *sizes), kept)
    else:
        matches = [[] for _ in kept]
    frequency = Counter(ngram for answer in matches for _, ngram in answer)
    rare = Ngrams.of(ngram for ngram, times in frequency.items() if times < contamination.frequent)
    parts = [decontaminate(Document("", text), rare) if answer else [Document("", text)]
             for text, answer in zip(kept, matches, strict=True)]  # fmt: skip
    return Chain(rows, Counter(part.text for each in parts if not isinstance(each, Drop) for part in each))


def _measure_whole(stage: Stage, repeats: int, plain: tuple[Any, ...], ours: tuple[Any, ...]) -> Taken:
    """Both functions of a stage that takes all documents at once, in turn."""
    sides = {PLAIN: (stage.plain, *plain), OURS: (stage.ours, *ours)}
    return in_turn(stage.name, repeats, {name: partial(cpu_seconds, *side) for name, side in sides.items()})[0]
