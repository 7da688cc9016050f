"""The data pipeline on one core, stage by stage beside the plain libraries, and as a whole beside their chain."""

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

from data_pipeline.config import DataConfig, DeduplicateConfig, SourcesConfig
from data_pipeline.contamination.decontaminate import decontaminate
from data_pipeline.contamination.testsets import find_test_set
from data_pipeline.contamination.words import Ngrams
from data_pipeline.document import Document, Drop
from data_pipeline.duplicates.components import components
from data_pipeline.reading.pieces import Piece
from data_pipeline.reading.readers import Limits, read_pieces
from data_pipeline.stages.language import Language
from data_pipeline.stages.length import Length
from experiments.bench.data_stages import (
    Pair,
    Signature,
    Stage,
    cleaning,
    decontamination,
    encoding,
    fingerprints_of,
    language,
    our_grouping,
    our_verification,
    pairs_of_buckets,
    pairs_of_queries,
    plain_grouping,
    plain_verification,
    signing,
)
from experiments.bench.data_whole import (
    beyond_starting,
    choose_vocabulary,
    datatrove_version,
    run_datatrove,
    run_pipeline,
    texts_of,
    write_few,
)
from lineage.digest import sha256_file
from lineage.environment import describe_environment
from lineage.errors import BadInput, DataMissing
from lineage.extras import install_command
from lineage.progress import Progress, announce

PAPER_GIGABYTES = 174
BLOCKS = 12
REPEATS = 3
EQUIVALENT = ("clean", "encode", "signatures", "group", "verify")
"""Stages that datatrove has too: its language filter needs a model and its decontamination tasks from a hub."""
NOTES = (
    "Seconds are processor seconds of one thread; plain and ours take the same blocks of documents in turn, and every "
    "answer is compared. Compiling and loading tables come before the clock.",
    "Whole is `mlm-data run` with one worker, files and all, less the same command on a few documents (starting); "
    "no rate is given where that leaves little. The plain chain is the sum of the plain stages. What is left at the "
    "end is compared document by document.",
    "datatrove does other work under the same names: five-word shingles, 14 bands of 8 rows, no verification.",
)
T = TypeVar("T")


def size_bytes(texts: Sequence[str]) -> int:
    """UTF-8 bytes of all texts."""
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)


def core_hours(cpu_seconds: float, megabytes: float) -> float:
    """Core-hours that the paper's 174 GB take at this rate."""
    return cpu_seconds / megabytes * PAPER_GIGABYTES * 1000 / 3600


def cpu_seconds(function: Callable[..., T], *arguments: Any) -> tuple[float, T]:
    """Processor seconds of this process that a call takes, and its answer."""
    start = time.process_time()
    answer = function(*arguments)
    return time.process_time() - start, answer


def row(
    name: str, library: str, goal: float | None, texts: Sequence[str], plain: Sequence[float], ours: Sequence[float],
    compared: int, differing: int, repeats: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """One stage as plain JSON values; `plain` and `ours` are CPU seconds, block by block or repeat by repeat."""
    megabytes = size_bytes(texts) / 1e6
    return {
        "stage": name,
        "library": library,
        "goal": goal,
        "documents": len(texts),
        "megabytes": round(megabytes, 3),
        "plain_seconds": round(sum(plain) / repeats, 4),
        "ours_seconds": round(sum(ours) / repeats, 4),
        "ratio": round(sum(plain) / sum(ours), 2),
        "ratio_median": round(median(a / b for a, b in zip(plain, ours, strict=True) if b), 2),
        "megabytes_per_second": round(megabytes * repeats / sum(ours), 2),
        "core_hours": round(core_hours(sum(ours) / repeats, megabytes), 2),
        "compared": compared,
        "differing": differing,
    }


def measure_stage(stage: Stage, texts: Sequence[str]) -> tuple[dict[str, Any], list[Any]]:
    """Both functions on the same blocks of documents in turn; the row and our answers."""
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
    return row(stage.name, stage.library, stage.goal, texts, plain, ours, len(texts), differing), answers


@dataclass(frozen=True)
class Chain:
    """What the stages did, one after the other."""

    rows: list[dict[str, Any]]
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
        found, answers = measure_stage(stage, documents)
        rows.append(found)
        return answers

    duplicates, contamination = config.deduplicate, config.decontaminate
    cleaned = [text for text in run(cleaning(), texts) if text.strip()]
    languages = run(language(), cleaned)
    spoken = [text for text, found in zip(cleaned, languages, strict=True) if found == Language().keep]
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
    frequency = Counter(ngram for found in matches for _, ngram in found)
    rare = Ngrams.of(ngram for ngram, times in frequency.items() if times < contamination.frequent)
    parts = [decontaminate(Document("", text), rare) if found else [Document("", text)]
             for text, found in zip(kept, matches, strict=True)]  # fmt: skip
    return Chain(rows, Counter(part.text for one in parts if not isinstance(one, Drop) for part in one))


def _measure_grouping(
    signatures: Sequence[Signature], texts: Sequence[str], config: DeduplicateConfig, rows: list[dict[str, Any]]
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
                found = pairs_of_buckets(answer)
    rows.append(
        row("group", "datasketch MinHashLSH", 30, texts, plain, ours, len(expected), len(expected ^ found), REPEATS)
    )
    return expected


def _measure_verification(
    signatures: Sequence[Signature], texts: Sequence[str], candidates: set[Pair], config: DeduplicateConfig,
    rows: list[dict[str, Any]],
) -> set[int]:  # fmt: skip
    fingerprints = fingerprints_of(signatures, config)
    bands = (np.ascontiguousarray(fingerprints[:, band]) for band in range(config.bands))
    labels = components(bands, np.ascontiguousarray(fingerprints[:, config.bands :]), config)
    our_verification(texts[:2], fingerprints[:2], np.zeros(2, np.int64), config)
    plain, expected = cpu_seconds(plain_verification, texts, candidates, config)
    ours, decided = cpu_seconds(our_verification, texts, fingerprints, labels, config)
    wrong = len(set(expected) ^ set(decided))
    rows.append(row("verify", "sets of strings", None, texts, [plain], [ours], len(expected), wrong))
    return {document for document, _ in decided}


def whole_row(plain: float, seconds: float, starting: float, megabytes: float) -> dict[str, Any]:
    """The pipeline beside the plain chain; without rates where its documents cost hardly more than starting."""
    own = beyond_starting(seconds, starting)
    return {
        "seconds": round(seconds, 3),
        "starting_seconds": round(starting, 3),
        "plain_seconds": round(plain, 3),
        "ratio": own and round(plain / own, 2),
        "goal": 20,
        "megabytes_per_second": own and round(megabytes / own, 2),
        "core_hours": own and round(core_hours(own, megabytes), 2),
        "goal_core_hours": 9,
    }


def measure_data(corpus: Path) -> dict[str, Any]:
    """Every stage and the whole of the default recipe on a corpus; the result as plain JSON values.

    Raises BadInput for a corpus that cannot be read or is too small.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    piece = Piece("jsonl", corpus.name, str(corpus), "", corpus.stat().st_size if corpus.is_file() else 0)
    found = list(read_pieces([piece], Limits()))
    texts = [one.text for one in found if isinstance(one, Document)]
    megabytes = size_bytes(texts) / 1e6
    announce(f"{megabytes:.1f} MB in {len(texts):,} documents, every stage by plain libraries and by ours")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "tokenizer").mkdir()
        vocabulary = choose_vocabulary(texts)
        vocabulary.tokenizer.save(work / "tokenizer")
        test_sets = tuple(path for path in map(_find, ("wikitext103", "lambada")) if path)
        config = DataConfig(name="bench", sources=SourcesConfig(names=(f"jsonl:{corpus}",)))
        chain = measure_stages(texts, work / "tokenizer", test_sets, config)
        few = write_few(work / "few.jsonl", texts)
        run_pipeline(few, vocabulary.recipe_of_few, work)  # machine code is compiled and kept
        starting = run_pipeline(few, vocabulary.recipe_of_few, work)[0]
        seconds, dataset = run_pipeline(corpus, vocabulary.recipe, work)
        left = texts_of(dataset)
        differing = ((chain.texts - left) + (left - chain.texts)).total()
        (work / "datatrove").mkdir()
        peer = run_datatrove(corpus, work / "tokenizer" / "tokenizer.json", work / "datatrove")
    whole = whole_row(sum(one["plain_seconds"] for one in chain.rows), seconds, starting, megabytes)
    return {
        "benchmark": "data",
        "corpus": {"name": corpus.name, "sha256": sha256_file(corpus), "documents": len(texts),
                   "malformed": len(found) - len(texts), "megabytes": round(megabytes, 3)},
        "vocabulary": vocabulary.description,
        "stages": chain.rows,
        "whole": whole | {"documents": left.total(), "differing": differing},
        "datatrove": _beside_datatrove(chain.rows, peer),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "notes": [*NOTES, f"Vocabulary: {vocabulary.description}."],
        "environment": describe_environment(),
    }  # fmt: skip


def _beside_datatrove(rows: Sequence[dict[str, Any]], peer: dict[str, float] | None) -> dict[str, Any]:
    if peer is None:
        return {"status": f"not installed: {install_command('bench')}"}
    ours = sum(one["ours_seconds"] for one in rows if one["stage"] in EQUIVALENT)
    return {
        "status": "measured",
        "version": datatrove_version(),
        "stages": {name: round(seconds, 3) for name, seconds in peer.items()},
        "seconds": round(sum(peer.values()), 3),
        "ours_seconds": round(ours, 3),
        "ratio": round(sum(peer.values()) / ours, 2),
        "goal": 15,
    }


def _find(name: str) -> Path | None:
    try:
        return find_test_set(name)
    except DataMissing:
        return None
