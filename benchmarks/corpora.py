"""Memory, disk and time of building corpora of given shapes, beside the promise of a dry run.

Texts are invented, and the same at every call. They and the promise are made in a fresh process,
whose peak of memory is its own.
"""

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import NamedTuple

from mlm_repro.data_pipeline.config import DataConfig
from mlm_repro.data_pipeline.reading.sources import open_sources
from mlm_repro.data_pipeline.runner import Promise, promise, rehearse
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.experiments.benchmark import Benchmark, Case
from mlm_repro.lineage.config import load_config
from mlm_repro.lineage.digest import bytes_below
from mlm_repro.lineage.errors import BadInput, UserError

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LOOK_SECONDS = 0.5
RECIPE = """
name = "shape"
workers = 1
stages = ["deduplicate", "split", "tokenize"]
sources.names = ["jsonl:{}"]
tokenizer.path = "{}"
"""
"""Recipe for `mlm-data` with places for a corpus and a tokenizer, without cleaning and languages,
which cost by the byte alone; a token is a byte."""
NOTES = [
    (
        "A build by one worker. Memory is its peak, all resident pages included; disk is the most"
        " that its work took, looked at twice a second, nameless files included; time is the"
        " processor's, so that what else runs is not in it."
    ),
    (
        "Promised is what the rehearsal of a dry run gives for the same corpus, in a process"
        " before it."
    ),
]


def words(rng: random.Random, count: int) -> str:
    """Return `count` words, invented by the generator `rng`, as a text with spaces between them."""
    return " ".join("".join(rng.choices(LETTERS, k=rng.randrange(2, 9))) for _ in range(count))


def crawl(rng: random.Random, number: int) -> str:
    """Return the text of document `number`: seven words invented by the generator `rng`, or, if the
    number is even, an error page that is always the same."""
    return words(rng, 7) if number % 2 else "page not found"


def templates(rng: random.Random, number: int) -> str:
    """Return the text of document `number`, a page of one of three templates, with words that the
    generator `rng` chooses. Pages of a template are alike but no duplicates. One page in fifty
    differs by a space alone from the page three before it, if that page's `rng` was `random.Random`
    of that page's number, as in `texts`; such a page does not use its own `rng`."""
    if number % 50 == 49:
        return templates(random.Random(number - 3), number - 3).replace(" ", "  ", 1)
    vocabulary = _vocabulary()
    return " ".join(vocabulary[80 * (number % 3) :][:80] + rng.choices(vocabulary, k=27))


@cache
def _vocabulary() -> list[str]:
    return words(random.Random(0), 3000).split()


class Shape(NamedTuple):
    """A kind of text for a corpus: the function that returns a document's text from two arguments,
    a random generator seeded by the document's number, and the number itself, counted from 0; and
    how many documents a corpus of it has."""

    text: Callable[[random.Random, int], str]
    documents: int


SHAPES = {
    "crawl": Shape(crawl, 2_000_000),
    "templates": Shape(templates, 200_000),
    "tweets": Shape(lambda rng, _: words(rng, rng.randrange(4, 30)), 300_000),
    # A book is so short that the smallest rehearsal of a dry run holds two.
    "books": Shape(
        lambda rng, _: "\n\n".join(words(rng, 90) for _ in range(rng.randrange(50, 80))), 1_000
    ),
    "code": Shape(
        lambda rng, _: "\n".join(
            f"    {words(rng, 1)} = {words(rng, 2)}" for _ in range(rng.randrange(60))
        ),
        30_000,
    ),
}


def texts(name: str, documents: int) -> Iterator[str]:
    """Return an iterator over one string for each of the first `documents` documents of the shape
    called `name`, a key of SHAPES. A string is seeded by its document's number, counted from 0, so
    it is the same at every call."""
    return (SHAPES[name].text(random.Random(number), number) for number in range(documents))


def write_corpus(path: Path, name: str, documents: int) -> Path:
    """Write the first `documents` texts of the shape `name`, a key of SHAPES, into the file `path`
    as JSON lines, each under the key `text`, and return `path`."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps({'text': text})}\n" for text in texts(name, documents))
    return path


def write_recipe(folder: Path, corpus: Path) -> Path:
    """Write into `folder` a tokenizer of bytes, as the directory `tokenizer`, and the file
    `recipe.toml`, with which `mlm-data` builds a dataset from `corpus`, a file of JSON lines, and
    that tokenizer. Return the recipe's path."""
    Tokenizer.train(["any"], 257).save(folder / "tokenizer")
    path = folder / "recipe.toml"
    path.write_text(RECIPE.format(corpus, folder / "tokenizer"), encoding="utf-8")
    return path


def promise_of(recipe: Path) -> Promise:
    """Return the Promise of a recipe's file, what a dry run of `mlm-data` says of it: documents,
    peak memory, and seconds and disk by stage. Builds samples of the corpus for it, as the dry
    run does. Raises UserError if that is not possible."""
    config = load_config(recipe, DataConfig, [])
    sources = open_sources(config.sources, config.seed)
    return promise(config, sources, rehearse(config, sources), sources.total_bytes)


def used(recipe: Path, runs: Path) -> tuple[int, int, float]:
    """Build the dataset of `recipe`, a file of `write_recipe`, below the folder `runs` with
    `mlm-data` in a process of its own. Return the peak of its memory and of its disk in bytes, and
    its processor seconds. Disk is looked at twice a second, so a short peak is missed; for a recipe
    with another name than `shape`, the files of its work folder are missed too.

    Raises UserError if the build fails.
    """
    program = Path(sys.executable).with_name("mlm-data")
    disk = 0
    process = Popen([program, "run", recipe, "--runs", runs], stdout=DEVNULL, stderr=DEVNULL)
    while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
        disk = max(disk, _taken(runs, process.pid))
        time.sleep(LOOK_SECONDS)
    if ended[1]:
        raise UserError(
            f"`{program.name} run` failed with exit code {os.waitstatus_to_exitcode(ended[1])}: its"
            " output was dropped, and its corpus is removed; to see the error, write corpus and"
            " recipe with `write_corpus` and `write_recipe`, and run it by hand"
        )
    return ended[2].ru_maxrss << 10, disk, ended[2].ru_utime + ended[2].ru_stime


def _taken(runs: Path, process: int) -> int:
    """Return the number of bytes of the files in the working folders of builds named `shape` below
    the folder `runs`, and of files without a name there that the process, given by its id, has
    mapped; 0 if a file cannot be read, as files may go meanwhile."""
    try:
        size = sum(bytes_below(work) for work in runs.glob("shape-*/.work"))
        for line in Path(f"/proc/{process}/maps").read_text().splitlines():
            if line.endswith("(deleted)") and str(runs) in line:
                start, end = (int(address, 16) for address in line.split()[0].split("-"))
                size += end - start
    except OSError:
        return 0
    return size


def measure(names: Sequence[str], part: float = 1.0) -> Benchmark:
    """Write a corpus of each shape in `names`, with the share `part` of the shape's documents, in a
    temporary folder, and build its dataset with `mlm-data`. Return the Benchmark, a record with a
    case for each shape: memory, disk and time used beside those promised. Raises BadInput for an
    unknown shape, UserError if a build fails or cannot be rehearsed."""
    # Imports torch, which the promise would count as memory.
    from benchmarks.timing import (
        ratio,
        series,
    )

    if unknown := [name for name in names if name not in SHAPES]:
        raise BadInput(f"no case {unknown[0]!r}; there are: {', '.join(SHAPES)}")
    cases = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder, get_context("spawn").Pool(1) as fresh:
            work = Path(folder)
            documents = round(part * SHAPES[name].documents)
            corpus = fresh.apply(write_corpus, (work / "corpus.jsonl", name, documents))
            recipe = write_recipe(work, corpus)
            promised = fresh.apply(promise_of, (recipe,))
            peaks = used(recipe, work / "runs")
            size = corpus.stat().st_size
        expected = promised.memory, sum(promised.disk.values()), sum(promised.seconds.values())
        rows = list(
            zip(
                ("memory", "disk", "time"),
                ("MB", "MB", "s"),
                (1e6, 1e6, 1),
                peaks,
                expected,
                strict=True,
            )
        )
        cases.append(
            Case(
                name=name,
                series=[
                    series(contender, what, unit, value / scale)
                    for what, unit, scale, mine, theirs in rows
                    for contender, value in (("used", mine), ("promised", theirs))
                ],
                ratios=[
                    ratio(f"{what}, used of promised", [mine], [theirs])
                    for what, _, _, mine, theirs in rows
                ],
                setting={"documents": documents, "megabytes": round(size / 1e6, 3)},
            )
        )
    return Benchmark(
        benchmark="data --case",
        title="Corpora of given shapes beside what a dry run promises",
        cases=cases,
        notes=NOTES,
    )
