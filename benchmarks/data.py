"""The data pipeline on one core: each stage beside its library on the documents that the stage
before kept, and whole.

The whole pipeline is `mlm-data run` in a process of its own; the plain chain is the sum of the
plain stages.
"""

import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import ftfy
import numpy as np
from datasketch import MinHashLSH
from tokenizers import Tokenizer as Backend

from benchmarks.timing import child_seconds, cpu_seconds, ratio, rounded, series
from mlm_repro.data_pipeline.config import DecontaminateConfig, DeduplicateConfig
from mlm_repro.data_pipeline.contamination.decontaminate import decontaminate, ngrams_of_files
from mlm_repro.data_pipeline.contamination.testsets import find_gpt2_vocabulary, find_test_set
from mlm_repro.data_pipeline.contamination.words import WORD, Ngrams
from mlm_repro.data_pipeline.document import Document, Drop, size_bytes
from mlm_repro.data_pipeline.duplicates.lsh import buckets, fingerprints, required_agreement
from mlm_repro.data_pipeline.duplicates.near_duplicates import Linked, flatten, link, resolve
from mlm_repro.data_pipeline.fast.exact_ftfy import fix_text
from mlm_repro.data_pipeline.fast.language import detect, reference_detection
from mlm_repro.data_pipeline.fast.minhash import as_sketch, reference_signature
from mlm_repro.data_pipeline.fast.shingles import shingles
from mlm_repro.data_pipeline.reading.pieces import SHARD_BYTES, Piece
from mlm_repro.data_pipeline.reading.readers import read_pieces
from mlm_repro.data_pipeline.stages.language import Language
from mlm_repro.data_pipeline.stages.length import Length
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.experiments.benchmark import Benchmark, Case, Ratio
from mlm_repro.lineage.digest import sha256_file
from mlm_repro.lineage.errors import BadInput, DataMissing
from mlm_repro.lineage.progress import Progress, announce

OURS = "ours"
PLAIN = "plain"
FASTER = "times faster"
SECONDS = "processor s"
BATCH = 1000
BLOCKS = 12
FEW, FEW_SECONDS = 20, 2.5
"""Documents of a small run, and the seconds that it may take."""
NOTES = [
    (
        "Seconds are processor seconds of one thread; plain and ours take the same blocks of"
        " documents in turn, and every answer is compared. Compiling and loading tables come before"
        " the clock."
    ),
    (
        "A stage's ratio is that of all its blocks together; duplicates are sought in all documents"
        " at once."
    ),
    (
        "Whole is `mlm-data run` with one worker, its start and its files included, in shards as"
        " large as those of the paper's corpus. The plain chain is the sum of the plain stages. All"
        " documents left at the end are compared."
    ),
    (
        "Two workers are timed by the clock beside one, in shards of the size that a recipe has"
        f" by itself; so is a run of {FEW} documents."
    ),
]


@dataclass(frozen=True)
class StageRivals:
    """A stage of the data pipeline as two functions: `plain`, by plain libraries, and `ours`, this
    program's. Both take a list of texts and return a list with an answer for each text; the two
    lists should be equal. `goal` is the least factor by which `ours` should be faster, None without
    a goal."""

    name: str
    library: str
    goal: float | None
    """The least factor by which our function should be faster than the plain one; None without a
    goal."""
    plain: Callable[[Sequence[str]], list[Any]]
    ours: Callable[[Sequence[str]], list[Any]]
    blocks: int = BLOCKS
    """Number of parts into which the texts are divided; both functions are given each part in
    turn."""


def measure(corpus: Path, rounds: int) -> Benchmark:
    """Measure every stage on `corpus`, a file of JSON lines, then the whole pipeline `rounds`
    times; return the Benchmark, the record. Test sets and GPT-2's vocabulary are downloaded if this
    machine lacks them; stages do without what cannot be had: without any test set nothing is
    decontaminated, without the vocabulary a token is a byte. Sets TOKENIZERS_PARALLELISM in the
    environment.

    Raises BadInput if the file cannot be read or fewer than two documents are left for some stage,
    UserError if the pipeline fails.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    size = corpus.stat().st_size if corpus.is_file() else 0
    every = list(read_pieces([Piece("jsonl", corpus.name, str(corpus), "", size)]))
    texts = [each.text for each in every if isinstance(each, Document)]
    megabytes = sum(map(size_bytes, texts)) / 1e6
    announce(
        f"{megabytes:.1f} MB in {len(texts):,} documents, every stage by plain libraries and by"
        " ours"
    )
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        tokenizer, recipe, vocabulary = choose_vocabulary()
        tokenizer.save(work / "tokenizer")
        test_sets = []
        for name in ("wikitext103", "lambada"):
            with suppress(DataMissing):
                test_sets.append(find_test_set(name))
        stages, expected = measure_stages(texts, work / "tokenizer", tuple(test_sets))
        few = write_texts(work / "few.jsonl", list(expected.elements())[:FEW])
        run_pipeline(recipe, work, few)  # machine code is compiled and cached
        runs = [
            [
                run_pipeline(recipe, work, few),
                run_pipeline(recipe, work, corpus),
                run_pipeline(recipe, work, corpus, 2),
                run_pipeline(recipe, work, corpus, 1, f"shard_bytes = {SHARD_BYTES}"),
            ]
            for _ in range(rounds)
        ]
        left = texts_of(runs[-1][3][2])
    small, single, double = ([many[index][1] for many in runs] for index in range(3))
    differing = ((expected - left) + (left - expected)).total()
    ours = [many[3][0] for many in runs]
    plain = sum(one_sample(case, PLAIN) for case in stages)
    pipeline = Case(
        name="whole beside the plain stages together",
        series=[
            series(OURS, "time", SECONDS, *ours),
            series(PLAIN, "time", SECONDS, plain),
            series(OURS, "throughput", "MB/s", *(megabytes / each for each in ours)),
        ],
        ratios=[ratio(FASTER, [plain] * rounds, ours, 30)],
        setting={"compared": left.total(), "differing": differing},
    )
    workers = Case(
        name="two workers beside one",
        series=[
            series("one worker", "time", "s", *single),
            series("two workers", "time", "s", *double),
        ],
        ratios=[ratio("times as fast", single, double, 1.7)],
    )
    start = Case(
        name=f"{FEW} documents",
        series=[series(OURS, "time", "s", *small)],
        ratios=[
            ratio(f"of {FEW_SECONDS} s", small, [FEW_SECONDS] * rounds, 1, less_is_better=True)
        ],
    )
    wrong = {case.name: case.setting["differing"] for case in [*stages, pipeline]}
    return Benchmark(
        benchmark="data",
        title="Data pipeline beside the libraries it replaces",
        cases=[*stages, start, workers, pipeline],
        disagreements=[f"{name}: {count} answers differ" for name, count in wrong.items() if count],
        notes=NOTES,
        setting={
            "corpus": {
                "name": corpus.name,
                "sha256": sha256_file(corpus),
                "documents": len(texts),
                "malformed": len(every) - len(texts),
                "megabytes": round(megabytes, 3),
            },
            "vocabulary": vocabulary,
        },
    )


def measure_stages(
    texts: Sequence[str], tokenizer: Path, test_sets: tuple[Path, ...]
) -> tuple[list[Case], Counter[str]]:
    """Measure each stage, by plain libraries and by our code, on the documents that the stage
    before kept; the first gets `texts`. Return a list of the record's Cases, and a Counter of the
    texts of the final documents. `tokenizer` is a directory, `test_sets` are files; without test
    sets nothing is decontaminated.

    Raises BadInput if fewer than two documents are left for a stage.
    """
    cases: list[Case] = []

    def run(stage: StageRivals, documents: Sequence[str]) -> list[Any]:
        if len(documents) < 2:
            raise BadInput(
                f"fewer than two documents of the corpus are left for the stage {stage.name},"
                f" {len(documents)}: give --corpus a larger file"
            )
        case, answers = measure_stage(stage, documents)
        cases.append(case)
        return answers

    contamination = DecontaminateConfig()
    cleaned = [text for text in run(cleaning(), texts) if text.strip()]
    plain = _each(lambda text: reference_detection(text)[0])
    languages = run(StageRivals("language", "langdetect", 25, plain, _each(detect)), cleaned)
    spoken = [
        text for text, answer in zip(cleaned, languages, strict=True) if answer == Language().keep
    ]
    tokens = run(encoding(tokenizer), spoken)
    enough = Length().min_tokens
    long = [text for text, ids in zip(spoken, tokens, strict=True) if len(ids) + 1 >= enough]
    survivors = run(deduplication(DeduplicateConfig()), long)
    rest = [text for text, survivor in zip(long, survivors, strict=True) if survivor < 0]
    matches: list[Any] = [[] for _ in rest]
    if test_sets:
        matches = run(
            decontamination(test_sets, contamination.ngram_words, contamination.min_ngram_words),
            rest,
        )
    frequency = Counter(ngram for answer in matches for _, ngram in answer)
    rare = Ngrams.of(
        ngram for ngram, times in frequency.items() if times < float(contamination.frequent)
    )
    parts = [
        decontaminate(Document("", text), rare) if answer else [Document("", text)]
        for text, answer in zip(rest, matches, strict=True)
    ]
    return cases, Counter(
        part.text for each in parts if not isinstance(each, Drop) for part in each
    )


def measure_stage(stage: StageRivals, texts: Sequence[str]) -> tuple[Case, list[Any]]:
    """Run a stage by plain libraries and by this suite, in turn on each block of the texts, and
    compare the answers text by text. Return a pair: the record's Case with both processor times,
    their ratio and the number of texts whose answers differ, and a list of our answers, one for
    each text.

    Before that, both are called with the first two texts; this loads tables and compiles, and is
    not counted.
    """
    bounds = np.linspace(0, len(texts), min(stage.blocks, len(texts)) + 1).astype(int)
    stage.plain(texts[:2])
    stage.ours(texts[:2])
    seconds = []
    answers = []
    differing = 0
    with Progress(stage.name, len(bounds) - 1, "blocks") as progress:
        for start, end in pairwise(bounds):
            plain, expected = cpu_seconds(stage.plain, texts[start:end])
            ours, given = cpu_seconds(stage.ours, texts[start:end])
            seconds.append((plain, ours))
            answers += given
            differing += sum(
                not np.array_equal(*both) for both in zip(expected, given, strict=True)
            )
            progress.advance()
    plain, ours = map(sum, zip(*seconds, strict=True))
    megabytes = sum(map(size_bytes, texts)) / 1e6
    case = Case(
        name=f"{stage.name} beside {stage.library}",
        series=[
            series(OURS, "time", SECONDS, ours),
            series(PLAIN, "time", SECONDS, plain),
            series(OURS, "throughput", "MB/s", megabytes / ours),
        ],
        ratios=[
            Ratio(
                name=FASTER,
                value=rounded(plain / ours),
                goal=stage.goal,
                rounds=[rounded(a / b) for a, b in seconds if b],
            )
        ],
        setting={
            "stage": stage.name,
            "documents": len(texts),
            "megabytes": round(megabytes, 3),
            "compared": len(texts),
            "differing": differing,
        },
    )
    return case, answers


def one_sample(case: Case, contender: str) -> float:
    """Return the median of the samples in the first series of `case` that is of `contender`. There
    must be one."""
    return median(next(row.samples for row in case.series if row.contender == contender))


def write_texts(path: Path, texts: Sequence[str]) -> Path:
    """Write the texts into the file `path` as JSON lines, each under the key `text`, and return
    `path`."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def choose_vocabulary() -> tuple[Tokenizer, str, str]:
    """Return a Tokenizer, the lines for it in a recipe's section `tokenizer` as a text, and the
    vocabulary's name in words: GPT-2's, downloaded if this machine lacks its files, or, if the
    files cannot be had, a vocabulary of the bytes alone."""
    try:
        return Tokenizer.from_gpt2_files(*find_gpt2_vocabulary()), 'kind = "gpt2"', "GPT-2's"
    except DataMissing:  # any text trains the bytes and the end of a text
        section = 'kind = "train"\nvocab_size = 257'
        name = "the bytes alone, as GPT-2's vocabulary is not here"
        return Tokenizer.train(["any"], 257), section, name


def run_pipeline(
    vocabulary: str, folder: Path, corpus: Path, workers: int = 1, more: str = ""
) -> tuple[float, float, Path]:
    """Run `mlm-data run` on `corpus`, a .jsonl file, by `workers` workers in a new directory inside
    `folder`; return the processor seconds of all its processes, the seconds by the clock, and the
    dataset's directory. `vocabulary` is the text of the recipe's section `tokenizer`, and `more`
    has further lines of the recipe before its first section.

    Raises UserError with the program's last line if it fails.
    """
    work = Path(tempfile.mkdtemp(dir=folder))
    recipe = work / "recipe.toml"
    recipe.write_text(
        f'name = "bench"\nworkers = {workers}\n{more}\n'
        f"[sources]\nnames = {json.dumps([f'jsonl:{corpus.absolute()}'])}\nmax_bad_fraction = 1.0\n"
        f"[tokenizer]\n{vocabulary}\n",
        encoding="utf-8",
    )
    program = Path(sys.executable).with_name("mlm-data")
    start = time.monotonic()
    seconds = child_seconds(program, "run", recipe, "--runs", work / "runs")
    return seconds, time.monotonic() - start, work / "runs" / "bench"


def texts_of(dataset: Path) -> Counter[str]:
    """Return a Counter of the texts of all documents in the folder `documents` of the directory of
    a built dataset."""
    return Counter(
        json.loads(line)["text"]
        for path in sorted((dataset / "documents").glob("**/*.jsonl"))
        for line in path.open(encoding="utf-8")
    )


def cleaning() -> StageRivals:
    """Return the StageRivals called `clean`, for the stage that cleans texts: `ftfy.fix_text` with
    its default settings, and our function, which should give the same texts at least 10 times
    faster."""
    return StageRivals("clean", "ftfy.fix_text", 10, _each(ftfy.fix_text), _each(fix_text("NFC")))


def encoding(directory: Path) -> StageRivals:
    """Return the StageRivals for the stage that encodes texts into token ids: Hugging Face
    tokenizers on the `tokenizer.json` in `directory`, a thousand documents at a time, and ours."""
    tokenizer = Tokenizer.load(directory)
    backend = Backend.from_file(str(directory / "tokenizer.json"))

    def plain(texts: Sequence[str]) -> list[list[int]]:
        return [
            encoding.ids
            for start in range(0, len(texts), BATCH)
            for encoding in backend.encode_batch(
                list(texts[start : start + BATCH]), add_special_tokens=False
            )
        ]

    return StageRivals("encode", "tokenizers", 5, plain, _each(tokenizer.encode_ids))


def reference_search(ngrams: Ngrams) -> Callable[[str], list[tuple[int, str]]]:
    """Return a function that, for a text, returns a list of (position in characters, n-gram) of
    every match of the n-grams of the Ngrams `ngrams`, by position and then in the order of
    `ngrams.lengths`. It uses sets of strings, for comparison with `Ngrams.search`, which finds the
    same."""
    longest = ngrams.lengths[0]
    shortest = ngrams.lengths[-1]
    prefixes = {" ".join(ngram.split(" ", shortest)[:shortest]) for ngram in ngrams.ngrams}

    def search(text: str) -> list[tuple[int, str]]:
        spans = list(WORD.finditer(text))
        matches = []
        words = [span.group().lower() for span in spans]
        for start in range(len(words) - shortest + 1):
            if " ".join(words[start : start + shortest]) in prefixes:
                here = words[start : start + longest]
                runs = (" ".join(here[:length]) for length in ngrams.lengths if length <= len(here))
                matches += [
                    (spans[start].start(), ngram) for ngram in runs if ngram in ngrams.ngrams
                ]
        return matches

    return search


def decontamination(test_sets: tuple[Path, ...], words: int, min_words: int) -> StageRivals:
    """Return a StageRivals whose two functions find every match of the test sets' n-grams in each
    of a list of texts: a plain search in sets of strings, and this suite's. The answer for a text
    is a list of matches with their positions. `test_sets` are files; `words` and `min_words` are
    the numbers of words in the longest and in the shortest n-gram. Raises BadInput if a file cannot
    be read or, a `.jsonl` one, has a line without `text`."""
    ngrams = ngrams_of_files(test_sets, words, min_words)
    plain = _each(reference_search(ngrams))
    ours = _each(lambda text: [*ngrams.search(text)])
    return StageRivals("decontaminate", "sets of strings", 12, plain, ours)


def deduplication(config: DeduplicateConfig) -> StageRivals:
    """Return the StageRivals, with the settings of `config`, for the stage that names for each text
    the index of the survivor if the text goes as a duplicate, else -1: datasketch's signatures and
    index with sets of strings, and ours.

    Ours takes all three steps as well: fingerprints, links, and decisions by component.
    """

    def plain(texts: Sequence[str]) -> list[int]:
        index = MinHashLSH(num_perm=config.num_permutations, params=config.banding)
        survivors = [-1] * len(texts)
        for document, text in enumerate(texts):
            values = reference_signature(text, config.num_permutations, config.shingle_characters)
            minhash = as_sketch(values, config.num_permutations)
            mine = shingles(text, config.shingle_characters)
            for earlier in sorted(index.query(minhash)):
                theirs = shingles(texts[earlier], config.shingle_characters)
                if len(mine & theirs) / len(mine | theirs) >= config.threshold:
                    survivors[document] = earlier
                    break
            else:
                index.insert(document, minhash, check_duplication=False)
        return survivors

    def ours(texts: Sequence[str]) -> list[int]:
        keys, sketches = map(
            np.ascontiguousarray, np.hsplit(fingerprints(texts, config), [config.banding[0]])
        )
        forest = np.arange(len(texts))
        partly = np.zeros(len(texts), np.bool_)
        for band in keys.T:
            link(
                forest,
                *buckets(np.ascontiguousarray(band)),
                sketches,
                required_agreement(config),
                partly,
            )
        members = np.argsort(flatten(forest), kind="stable")
        starts = np.flatnonzero(np.diff(forest[members], prepend=-1, append=-1))
        resolution = resolve(
            Linked(members, starts, lambda band: keys[members, band], sketches, texts.__getitem__),
            config,
        )
        survivors = np.full(len(texts), -1)
        survivors[resolution.decisions["document"]] = resolution.decisions["survivor"]
        return survivors.tolist()

    return StageRivals("deduplicate", "datasketch and sets of strings", 20, plain, ours, blocks=1)


def _each(function: Callable[[str], Any]) -> Callable[[Sequence[str]], list[Any]]:
    return lambda texts: [function(text) for text in texts]
