"""The data pipeline on one core: each stage beside its library on the documents that the stage before kept, and whole.

The whole pipeline is `mlm-data run` in a process of its own; the plain chain is the sum of the plain stages.
"""

import json
import math
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import ftfy
import numpy as np
from datasketch import MinHashLSH
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend

from benchmarks.timing import child_seconds, cpu_seconds, ratio, rounded, series
from mlm_repro.data_pipeline.config import DataConfig, DeduplicateConfig, SourcesConfig
from mlm_repro.data_pipeline.contamination.decontaminate import decontaminate, ngrams_of_files
from mlm_repro.data_pipeline.contamination.testsets import find_gpt2_vocabulary, find_test_set
from mlm_repro.data_pipeline.contamination.words import Ngrams, indexed_search, reference_search
from mlm_repro.data_pipeline.document import Document, Drop, size_bytes
from mlm_repro.data_pipeline.duplicates.lsh import band_keys, buckets, fingerprints, required_agreement
from mlm_repro.data_pipeline.duplicates.near_duplicates import flatten, link, resolve
from mlm_repro.data_pipeline.fast.exact_ftfy import fix_text
from mlm_repro.data_pipeline.fast.language import detect, reference_detection
from mlm_repro.data_pipeline.fast.minhash import as_sketch, reference_signature, signature
from mlm_repro.data_pipeline.fast.shingles import shingles
from mlm_repro.data_pipeline.passes.prepare import QUARANTINE
from mlm_repro.data_pipeline.reading.pieces import SHARD_BYTES, Piece
from mlm_repro.data_pipeline.reading.readers import read_pieces
from mlm_repro.data_pipeline.stages.language import Language
from mlm_repro.data_pipeline.stages.length import Length
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.experiments.benchmark import Benchmark, Case, Ratio
from mlm_repro.lineage.digest import MARKER, sha256_file
from mlm_repro.lineage.errors import BadInput, DataMissing, UserError
from mlm_repro.lineage.progress import Progress, announce

OURS, PLAIN, FASTER = "ours", "plain", "times faster"
SECONDS = "processor s"
BATCH, BLOCKS = 1000, 12
BASE_SHARE, REPEATED = 0.2, 10
"""The share of documents in the base, and how many of these come again with a word more."""
LEAST_SHARE = 0.25
"""The least part of the base's time that the rest of the corpus must cost to be told apart from its noise."""
NOTES = [
    "Seconds are processor seconds of one thread; plain and ours take the same blocks of documents in turn, and every "
    "answer is compared. Compiling and loading tables come before the clock.",
    "A stage's ratio is that of all its blocks together.",
    "Whole is `mlm-data run` with one worker, files and all, in shards as large as those of the paper's corpus, less "
    "the same command on a fifth of the documents (base): starting does not grow with the corpus. No rate is given "
    "where little is left. The plain chain is the sum of the plain stages. All documents left at the end are compared.",
    "Two workers build one dataset of both halves of the corpus, by the clock; apart, two commands build a half each. "
    "The end comes after the last slice: files are joined, flushed and sealed.",
]

Pair = tuple[int, int]
Blocks = Sequence[tuple[tuple[Any, ...], tuple[Any, ...]]]
"""The arguments of plain and of ours, block by block."""


def in_a_row(blocks: Sequence[Any]) -> list[Any]:
    """Return the answers of all blocks, one for each document."""
    return [answer for block in blocks for answer in block]


@dataclass(frozen=True)
class StageRivals:
    """A stage's two functions; the second should give the first one's answers."""

    name: str
    library: str
    goal: float | None
    """The factor by which ours should be faster."""
    plain: Callable[..., list[Any]]
    ours: Callable[..., list[Any]]
    compared: tuple[Callable[[Sequence[Any]], Any], Callable[[Sequence[Any]], Any]] = (in_a_row, in_a_row)
    """How the blocks' answers of each become what is compared: a list, or a set of pairs."""


def measure(corpus: Path, rounds: int) -> Benchmark:
    """Measure every stage, then the whole pipeline `rounds` times.

    Raises BadInput if no documents are left at some stage.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    piece = Piece("jsonl", corpus.name, str(corpus), "", corpus.stat().st_size if corpus.is_file() else 0)
    every = list(read_pieces([piece]))
    texts = [each.text for each in every if isinstance(each, Document)]
    megabytes = sum(map(size_bytes, texts)) / 1e6
    announce(f"{megabytes:.1f} MB in {len(texts):,} documents, every stage by plain libraries and by ours")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        tokenizer, recipe, vocabulary = choose_vocabulary()
        tokenizer.save(work / "tokenizer")
        test_sets = []
        for name in ("wikitext103", "lambada"):
            with suppress(DataMissing):
                test_sets.append(find_test_set(name))
        base_texts = texts[: math.ceil(BASE_SHARE * len(texts))]
        base_texts += [f"{text} Indeed." for text in base_texts[:REPEATED]]
        base = write_texts(work / "base.jsonl", base_texts)
        with suppress(UserError):  # the stages say of too small a corpus which leaves too little
            run_pipeline(recipe, work, base)  # machine code is compiled and cached
        config = DataConfig(name="bench", sources=SourcesConfig(names=(f"jsonl:{corpus}",)))
        stages, expected = measure_stages(texts, work / "tokenizer", tuple(test_sets), config)
        runs = []
        for _ in range(rounds):
            base_seconds, _ = run_pipeline(recipe, work, base)
            all_seconds, dataset = run_pipeline(recipe, work, corpus)
            runs.append((all_seconds, base_seconds))
        left = texts_of(dataset)
        workers = workers_case(texts, recipe, work, rounds)
    differing = ((expected - left) + (left - expected)).total()
    plain = sum(one_sample(case, PLAIN) for case in stages)
    whole = whole_case(plain, runs, megabytes, sum(map(size_bytes, base_texts)) / 1e6, left.total(), differing)
    wrong = {case.name: case.setting["differing"] for case in [*stages, whole]}
    return Benchmark(
        benchmark="data",
        title="Data pipeline beside the libraries it replaces",
        cases=[*stages, workers, whole],
        disagreements=[f"{name}: {count} answers differ" for name, count in wrong.items() if count],
        notes=NOTES,
        setting={
            "corpus": {"name": corpus.name, "sha256": sha256_file(corpus), "documents": len(texts),
                       "malformed": len(every) - len(texts), "megabytes": round(megabytes, 3)},
            "vocabulary": vocabulary,
        },
    )  # fmt: skip


def measure_stages(
    texts: Sequence[str], tokenizer: Path, test_sets: tuple[Path, ...], config: DataConfig
) -> tuple[list[Case], Counter[str]]:
    """Measure each stage on the documents that the stage before kept; return the cases and the final documents.

    Raises BadInput if no documents are left on the way.
    """
    cases: list[Case] = []

    def run(stage: StageRivals, documents: Sequence[str], blocks: Blocks = ()) -> Any:
        if len(documents) < 2:
            raise BadInput(f"too little of the corpus is left for the stage {stage.name}: {len(documents)} documents")
        case, answers = measure_stage(stage, documents, blocks)
        cases.append(case)
        return answers

    duplicates, contamination = config.deduplicate, config.decontaminate
    cleaned = [text for text in run(cleaning(), texts) if text.strip()]
    plain = _each(lambda text: reference_detection(text)[0])
    languages = run(StageRivals("language", "langdetect", 25, plain, _each(detect)), cleaned)
    spoken = [text for text, answer in zip(cleaned, languages, strict=True) if answer == Language().keep]
    tokens = run(encoding(tokenizer), spoken)
    enough = Length().min_tokens
    long = [text for text, ids in zip(spoken, tokens, strict=True) if len(ids) + 1 >= enough]
    signatures = run(signing(duplicates), long)
    pairs = run(grouping(duplicates), long, [((some,), (some,)) for some in (signatures[:2], signatures)])
    prints, labels = fingerprints(long, duplicates), np.arange(len(long))
    keys, sketches = map(np.ascontiguousarray, np.hsplit(prints, [duplicates.banding[0]]))
    for band in keys.T:
        link(labels, *buckets(np.ascontiguousarray(band)), sketches, required_agreement(duplicates))
    few = (long[:2], set[Pair]()), (long[:2], prints[:2], np.zeros(2, np.int64))
    decided = run(verification(duplicates), long, [few, ((long, pairs), (long, prints, flatten(labels)))])
    gone = {document for document, _ in decided}
    rest = [text for number, text in enumerate(long) if number not in gone]
    matches: list[Any] = [[] for _ in rest]
    if test_sets:
        matches = run(decontamination(test_sets, contamination.ngram_words, contamination.min_ngram_words), rest)
    frequency = Counter(ngram for answer in matches for _, ngram in answer)
    rare = Ngrams.of(ngram for ngram, times in frequency.items() if times < float(contamination.frequent))
    parts = [decontaminate(Document("", text), rare) if answer else [Document("", text)]
             for text, answer in zip(rest, matches, strict=True)]  # fmt: skip
    return cases, Counter(part.text for each in parts if not isinstance(each, Drop) for part in each)


def measure_stage(stage: StageRivals, texts: Sequence[str], blocks: Blocks = ()) -> tuple[Case, Any]:
    """Run both functions in turn on their arguments of each block, by default parts of the texts.

    The first block loads tables and compiles, and is not counted. Returns the case and our answers.
    """
    if not blocks:
        bounds = np.linspace(0, len(texts), min(BLOCKS, len(texts)) + 1).astype(int)
        parts = [texts[:1], *(texts[start:end] for start, end in pairwise(bounds))]
        blocks = [((part,), (part,)) for part in parts]
    taken: tuple[list[tuple[float, Any]], ...] = ([], [])
    with Progress(stage.name, len(blocks), "blocks") as progress:
        for for_plain, for_ours in blocks:
            taken[0].append(cpu_seconds(stage.plain, *for_plain))
            taken[1].append(cpu_seconds(stage.ours, *for_ours))
            progress.advance()
    plain, ours = ([seconds for seconds, _ in many[1:]] for many in taken)
    expected, mine = (join([answer for _, answer in many[1:]])
                      for join, many in zip(stage.compared, taken, strict=True))  # fmt: skip
    if isinstance(mine, set):
        differing = len(expected ^ mine)
    else:
        differing = sum(not np.array_equal(left, right) for left, right in zip(expected, mine, strict=True))
    megabytes = sum(map(size_bytes, texts)) / 1e6
    rounds = [rounded(a / b) for a, b in zip(plain, ours, strict=True) if b]
    case = Case(
        name=f"{stage.name} beside {stage.library}",
        series=[
            series(OURS, "time", SECONDS, sum(ours)),
            series(PLAIN, "time", SECONDS, sum(plain)),
            series(OURS, "throughput", "MB/s", megabytes / sum(ours)),
        ],
        ratios=[Ratio(name=FASTER, value=rounded(sum(plain) / sum(ours)), rounds=rounds, goal=stage.goal)],
        setting={"stage": stage.name, "documents": len(texts), "megabytes": round(megabytes, 3),
                 "compared": len(expected), "differing": differing},
    )  # fmt: skip
    return case, mine


def whole_case(
    plain: float, runs: Sequence[tuple[float, float]], megabytes: float, base_megabytes: float, documents: int,
    differing: int,
) -> Case:  # fmt: skip
    """Compare the pipeline with the plain chain; no ratio if the documents beyond the base cost too little."""
    is_measured = all(all_ - base >= LEAST_SHARE * base for all_, base in runs)
    own = [(all_ - base) * megabytes / (megabytes - base_megabytes) for all_, base in runs] if is_measured else []
    return Case(
        name="whole beside the plain stages together",
        series=[
            series(OURS, "time", SECONDS, *(all_ for all_, _ in runs)),
            series(PLAIN, "time", SECONDS, plain),
            series("base", "time", SECONDS, *(base for _, base in runs)),
            *([series(OURS, "throughput", "MB/s", *(megabytes / each for each in own))] if own else []),
        ],
        ratios=[ratio(FASTER, [plain] * len(own), own, 50)] if own else [],
        missing={} if own else {OURS: "the corpus is too small: it costs hardly more than a fifth of it"},
        setting={"compared": documents, "differing": differing},
    )


def workers_case(texts: Sequence[str], vocabulary: str, folder: Path, rounds: int) -> Case:
    """Compare two workers with two builds side by side, and what one worker does alone at the end with the whole."""
    halves = [write_texts(folder / f"half-{number}.jsonl", texts[number::2]) for number in range(2)]
    seconds: dict[str, list[float]] = {"apart": [], "two workers": [], "end": []}
    for _ in range(rounds):
        start = time.monotonic()
        with ThreadPoolExecutor() as pool:
            list(pool.map(partial(run_pipeline, vocabulary, folder), halves))
        seconds["apart"].append(time.monotonic() - start)
        _, dataset = run_pipeline(vocabulary, folder, *halves, workers=2)
        seconds["two workers"].append(time.monotonic() - start - seconds["apart"][-1])
        seconds["end"].append((dataset / MARKER).stat().st_mtime - (dataset / QUARANTINE).stat().st_mtime)
    return Case(
        name="two workers beside two builds",
        series=[series(name, "time", "s", *samples) for name, samples in seconds.items()],
        ratios=[
            ratio("times as fast", seconds["apart"], seconds["two workers"], 0.95),
            ratio("share of the end", seconds["end"], seconds["two workers"], 0.03, less_is_better=True),
        ],
    )


def one_sample(case: Case, contender: str) -> float:
    """Return the median of a contender's first series."""
    return median(next(each.samples for each in case.series if each.contender == contender))


def write_texts(path: Path, texts: Sequence[str]) -> Path:
    """Write a .jsonl file and return its path."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def choose_vocabulary() -> tuple[Tokenizer, str, str]:
    """Return GPT-2's vocabulary or, without its files, the bytes alone; the recipe's section for it; its name."""
    try:
        return Tokenizer.from_gpt2_files(*find_gpt2_vocabulary()), 'kind = "gpt2"', "GPT-2's"
    except DataMissing:  # any text trains the bytes and the end of a text
        section, name = 'kind = "train"\nvocab_size = 257', "the bytes alone, as GPT-2's vocabulary is not here"
        return Tokenizer.train(["any"], 257), section, name


def run_pipeline(vocabulary: str, folder: Path, *corpora: Path, workers: int = 1) -> tuple[float, Path]:
    """Run `mlm-data run`; return the processor seconds of all its processes, and its dataset.

    Raises UserError with its last line if it fails.
    """
    work = Path(tempfile.mkdtemp(dir=folder))
    recipe = work / "recipe.toml"
    recipe.write_text(
        f'name = "bench"\nworkers = {workers}\nshard_bytes = {SHARD_BYTES}\n'
        f"[sources]\nnames = {json.dumps([f'jsonl:{each.absolute()}' for each in corpora])}\nmax_bad_fraction = 1.0\n"
        f"[tokenizer]\n{vocabulary}\n",
        encoding="utf-8",
    )
    program = Path(sys.executable).with_name("mlm-data")
    return child_seconds(program, "run", recipe, "--runs", work / "runs"), work / "runs" / "bench"


def texts_of(dataset: Path) -> Counter[str]:
    """Return every document of the dataset's splits."""
    return Counter(
        json.loads(line)["text"]
        for path in sorted((dataset / "documents").glob("**/*.jsonl"))
        for line in path.open(encoding="utf-8")
    )


def cleaning() -> StageRivals:
    """ftfy with its default settings."""
    return StageRivals("clean", "ftfy.fix_text", 10, _each(ftfy.fix_text), _each(fix_text("NFC")))


def encoding(directory: Path) -> StageRivals:
    """Hugging Face tokenizers on the directory's `tokenizer.json`, a thousand documents at a time, on one thread."""
    tokenizer, backend = Tokenizer.load(directory), Backend.from_file(str(directory / "tokenizer.json"))

    def plain(texts: Sequence[str]) -> list[list[int]]:
        return [
            encoding.ids
            for start in range(0, len(texts), BATCH)
            for encoding in backend.encode_batch(list(texts[start : start + BATCH]), add_special_tokens=False)
        ]

    return StageRivals("encode", "tokenizers", 5, plain, _each(tokenizer.encode_ids))


def signing(config: DeduplicateConfig) -> StageRivals:
    """datasketch's MinHash.update_batch over a document's set of shingles."""
    sizes = config.num_permutations, config.shingle_characters
    plain, ours = _each(lambda text: reference_signature(text, *sizes)), _each(lambda text: signature(text, *sizes))
    return StageRivals("signatures", "datasketch update_batch", 10, plain, ours)


def decontamination(test_sets: tuple[Path, ...], words: int, min_words: int) -> StageRivals:
    """Sets of strings: every match of a test set's n-grams, with its place."""
    ngrams = ngrams_of_files(test_sets, words, min_words)
    plain = _each(lambda text: [*reference_search((ngrams, text))])
    ours = _each(lambda text: [*indexed_search((ngrams, text))])
    return StageRivals("decontaminate", "sets of strings", 12, plain, ours)


def grouping(config: DeduplicateConfig) -> StageRivals:
    """datasketch's index against our buckets of each band: every two documents that share one."""

    def plain(signatures: Sequence[NDArray[np.uint32]]) -> list[Any]:
        index = MinHashLSH(num_perm=config.num_permutations, params=config.banding)
        neighbours = []
        for document, values in enumerate(signatures):
            minhash = as_sketch(values, config.num_permutations)
            neighbours.append(index.query(minhash))
            index.insert(document, minhash, check_duplication=False)
        return neighbours

    def ours(signatures: Sequence[NDArray[np.uint32]]) -> list[Any]:
        keys = band_keys(np.stack(signatures), config.banding[0])
        return [buckets(np.ascontiguousarray(keys[:, band])) for band in range(config.banding[0])]

    def pairs_of_neighbours(blocks: Sequence[Any]) -> set[Pair]:
        return {(earlier, document) for document, near in enumerate(blocks[0]) for earlier in near}

    def pairs_of_buckets(blocks: Sequence[Any]) -> set[Pair]:
        return {pair for documents, starts in blocks[0] for start, end in pairwise(starts)
                for pair in combinations(map(int, documents[start:end]), 2)}  # fmt: skip

    pairs = pairs_of_neighbours, pairs_of_buckets
    return StageRivals("group", "datasketch MinHashLSH", 30, plain, ours, pairs)


def verification(config: DeduplicateConfig) -> StageRivals:
    """Sets of strings from candidate pairs against fingerprints, component by component.

    Both return each document that goes, with the earlier one that is kept for it.
    """

    def plain(texts: Sequence[str], candidates: set[Pair]) -> list[Pair]:
        earlier: dict[int, list[int]] = defaultdict(list)
        for first, second in sorted(candidates):
            earlier[second].append(first)
        gone: dict[int, int] = {}
        for document in sorted(earlier):
            mine = shingles(texts[document], config.shingle_characters)
            for other in (each for each in earlier[document] if each not in gone):
                theirs = shingles(texts[other], config.shingle_characters)
                shared = len(theirs & mine)
                if shared / (len(theirs) + len(mine) - shared) >= config.threshold:
                    gone[document] = other
                    break
        return list(gone.items())

    def ours(texts: Sequence[str], prints: NDArray[np.uint64], components: NDArray[np.int64]) -> list[Pair]:
        members = np.argsort(components, kind="stable")
        starts = np.flatnonzero(np.diff(components[members], prepend=-1, append=-1))
        keys, sketches = prints[members], np.ascontiguousarray(prints[:, config.banding[0] :])
        resolution = resolve(members, starts, lambda band: keys[:, band].copy(), sketches, texts.__getitem__, config)
        return [(int(document), int(survivor)) for document, survivor, _ in resolution.decisions]

    def pairs(blocks: Sequence[list[Pair]]) -> set[Pair]:
        return set(blocks[0])

    return StageRivals("verify", "sets of strings", None, plain, ours, (pairs, pairs))


def _each(function: Callable[[str], Any]) -> Callable[[Sequence[str]], list[Any]]:
    return lambda texts: [function(text) for text in texts]
