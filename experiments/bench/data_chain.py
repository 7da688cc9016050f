"""The stages of the data pipeline one after the other, each beside its library, on what the one before it kept."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from data_pipeline.config import DataConfig, DeduplicateConfig
from data_pipeline.contamination.decontaminate import decontaminate
from data_pipeline.contamination.testsets import find_gpt2_vocabulary
from data_pipeline.contamination.words import Ngrams
from data_pipeline.document import Document, Drop
from data_pipeline.duplicates.components import components
from data_pipeline.stages.language import Language
from data_pipeline.stages.length import Length
from data_pipeline.tokens.tokenizer import Tokenizer
from experiments.bench.data_stages import (
    Pair,
    Signature,
    Stage,
    cleaning,
    decontamination,
    encoding,
    fingerprints_of,
    in_kept_language,
    language,
    our_grouping,
    our_verification,
    pairs_of_buckets,
    pairs_of_queries,
    plain_grouping,
    plain_verification,
    signing,
)
from experiments.bench.data_whole import FASTER, HOURS, OURS, PLAIN, SECONDS, answers, core_hours
from experiments.bench.timing import rounded, series
from lineage.benchmark import Case, Ratio
from lineage.errors import BadInput, DataMissing
from lineage.progress import Progress

BLOCKS = 12
REPEATS = 3
TRAINED_SIZES = (8192, 4096, 2048, 1024, 512, 257)
"""Tokens of a vocabulary that is trained where GPT-2's is not here; any text gives the last, which is the bytes."""
T = TypeVar("T")


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


def cpu_seconds(function: Callable[..., T], *arguments: Any) -> tuple[float, T]:
    """Processor seconds of this process that a call takes, and its answer."""
    start = time.process_time()
    answer = function(*arguments)
    return time.process_time() - start, answer


def summarize(
    name: str, library: str, goal: float | None, texts: Sequence[str], plain: Sequence[float], ours: Sequence[float],
    compared: int, differing: int, repeats: int = 1,
) -> Case:  # fmt: skip
    """One stage; `plain` and `ours` are processor seconds, block by block or repeat by repeat."""
    megabytes = size_bytes(texts) / 1e6
    blocks = [a / b for a, b in zip(plain, ours, strict=True) if b]
    return Case(
        name=f"{name} beside {library}",
        series=[
            series(OURS, "time", SECONDS, sum(ours) / repeats),
            series(PLAIN, "time", SECONDS, sum(plain) / repeats),
            series(OURS, "throughput", "MB/s", megabytes * repeats / sum(ours)),
            series(OURS, HOURS, "core-hours", core_hours(sum(ours) / repeats, megabytes)),
            *answers(compared, differing),
        ],
        ratios=[Ratio(name=FASTER, value=rounded(sum(plain) / sum(ours)), rounds=[*map(rounded, blocks)], goal=goal)],
        setting={"stage": name, "documents": len(texts), "megabytes": round(megabytes, 3)},
    )


def measure_stage(stage: Stage, texts: Sequence[str]) -> tuple[Case, list[Any]]:
    """Both functions on the same blocks of documents in turn; the case and our answers."""
    plain: list[float] = []
    ours: list[float] = []
    answers: list[Any] = []
    differing = 0
    stage.plain(texts[:1]), stage.ours(texts[:1])  # loads tables and compiles
    bounds = np.linspace(0, len(texts), min(BLOCKS, len(texts)) + 1).astype(int)
    with Progress(stage.name, len(texts), "documents") as progress:
        for number, (start, end) in enumerate(pairwise(bounds)):
            block = texts[start:end]
            sides = [(stage.plain, plain), (stage.ours, ours)]
            answered = {}
            for function, seconds in sides if number % 2 else sides[::-1]:
                taken, answered[function] = cpu_seconds(function, block)
                seconds.append(taken)
            pairs = zip(answered[stage.plain], answered[stage.ours], strict=True)
            differing += sum(not np.array_equal(left, right) for left, right in pairs)
            answers += answered[stage.ours]
            progress.advance(len(block))
    return summarize(stage.name, stage.library, stage.goal, texts, plain, ours, len(texts), differing), answers


@dataclass(frozen=True)
class Chain:
    """What the stages did, one after the other."""

    cases: list[Case]
    texts: Counter[str]
    """What is left at the end."""


def measure_stages(
    texts: Sequence[str], tokenizer: Path, test_sets: tuple[Path, ...], config: DataConfig
) -> Chain:  # fmt: skip
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
    cleaned = [text for text in run(cleaning(), texts) if text.strip()]
    languages = run(language(), cleaned)
    spoken = [text for text, answer in zip(cleaned, languages, strict=True) if answer == Language().keep]
    tokens = run(encoding(tokenizer), spoken)
    enough = Length().min_tokens
    long = [text for text, ids in zip(spoken, tokens, strict=True) if len(ids) + 1 >= enough]
    signatures = run(signing(duplicates), long)
    candidates = _measure_grouping(signatures, long, duplicates, rows)
    gone = _measure_verification(signatures, long, candidates, duplicates, rows)
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
    return Chain(rows, Counter(part.text for each in parts if not isinstance(each, Drop) for part in each))


def _measure_grouping(
    signatures: Sequence[Signature], texts: Sequence[str], config: DeduplicateConfig, rows: list[Case]
) -> set[Pair]:
    plain: list[float] = []
    ours: list[float] = []
    our_grouping(signatures[:2], config)
    for number in range(REPEATS):
        sides = [(plain_grouping, plain), (our_grouping, ours)]
        for function, seconds in sides if number % 2 else sides[::-1]:
            taken, answer = cpu_seconds(function, signatures, config)
            seconds.append(taken)
            if function is plain_grouping:
                expected = pairs_of_queries(answer)
            else:
                pairs = pairs_of_buckets(answer)
    rows.append(
        summarize(
            "group", "datasketch MinHashLSH", 30, texts, plain, ours, len(expected), len(expected ^ pairs), REPEATS
        )
    )
    return expected


def _measure_verification(
    signatures: Sequence[Signature], texts: Sequence[str], candidates: set[Pair], config: DeduplicateConfig,
    rows: list[Case],
) -> set[int]:  # fmt: skip
    fingerprints = fingerprints_of(signatures, config)
    bands = (np.ascontiguousarray(fingerprints[:, band]) for band in range(config.bands))
    labels = components(bands, np.ascontiguousarray(fingerprints[:, config.bands :]), config)
    our_verification(texts[:2], fingerprints[:2], np.zeros(2, np.int64), config)
    plain, expected = cpu_seconds(plain_verification, texts, candidates, config)
    ours, decided = cpu_seconds(our_verification, texts, fingerprints, labels, config)
    wrong = len(set(expected) ^ set(decided))
    rows.append(summarize("verify", "sets of strings", None, texts, [plain], [ours], len(expected), wrong))
    return {document for document, _ in decided}
