"""Throughput and memory of the data pipeline against the size of its input."""

import json
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer

from experiments.bench.data_whole import base_of, beyond_starting, read_texts, run_pipeline, write_texts
from experiments.bench.timing import NOTES, ratio, series
from lineage.benchmark import Benchmark, Case
from lineage.digest import sha256_file
from lineage.errors import BadInput, UserError
from lineage.progress import Progress, announce, format_bytes

SEED = 1234
SIZES = (20.0, 200.0, 2000.0)
"""Megabytes."""
PARAGRAPHS = (4, 16)
"""Least and most paragraphs in a document."""
BASE_MEGABYTES = 2
"""For each worker, in the build whose cost is that of starting."""
TOLERANCE = 0.2
WORKERS_GOAL = 0.95
"""Of as many times the speed of one worker as there are workers, and of what as many builds at once gain."""
WORKER_BYTES = 700_000_000
"""A worker with every library, table and n-gram of the test sets loaded."""
LARGEST_DOCUMENT_FACTOR = 12
DOCUMENT_BYTES = 40
"""Arrays of document numbers, in one process at a time."""


def measure(
    corpus: Annotated[Path, typer.Option("--corpus", help="A .jsonl file whose paragraphs the corpora are made of.")],
    megabytes: Annotated[list[float] | None, typer.Option(help="Size of a corpus; may be repeated.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
) -> Benchmark:
    """The data pipeline at 20, 200 and 2,000 MB: throughput, what workers add, peak memory and its stated bound."""
    from data_pipeline.runner import ROOM_OF_A_DATASET
    from experiments.bench.data_chain import choose_vocabulary

    paragraphs, sizes, counts = _paragraphs(corpus), megabytes or SIZES, sorted({1, workers})
    announce(
        f"builds datasets of {', '.join(f'{size:g}' for size in sizes)} MB by {' and '.join(map(str, counts))} workers",
        f"up to {format_bytes((1 + workers * ROOM_OF_A_DATASET) * 1e6 * max(sizes))} of disk",
    )
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        base = write_corpus(work / "base.jsonl", paragraphs, BASE_MEGABYTES * workers)[0]
        base_megabytes = base.stat().st_size / 1e6
        texts = ["\n\n".join(paragraphs[at : at + 8]) for at in range(0, len(paragraphs), 8)]
        vocabulary = choose_vocabulary(read_texts(base)[0])
        few = write_texts(work / "few.jsonl", base_of(texts))
        run_pipeline(few, vocabulary.recipe_of_few, work, workers)  # machine code is compiled and kept
        starting = run_pipeline(base, vocabulary.recipe, work)[0].cpu_seconds
        cases, rates = [], []
        with Progress("data-scale", len(sizes), "corpora") as progress:
            for size in sizes:
                path, documents, largest = write_corpus(work / "corpus.jsonl", paragraphs, size)
                bound = memory_bound_bytes(documents, largest, workers)
                built = {}
                for count in counts:
                    built[count], dataset = run_pipeline(path, vocabulary.recipe, work, count, bound)
                    shutil.rmtree(dataset.parent)
                times = [
                    series(f"clock, workers: {count}", "time", "s", spent.seconds) for count, spent in built.items()
                ]
                if workers > 1 and size == sizes[-1]:
                    together = _seconds_together(path, vocabulary.recipe, work, workers)
                    times.append(series(f"clock, builds at once: {workers}", "time", "s", together))
                read = path.stat().st_size / 1e6
                if (own := beyond_starting(built[1].cpu_seconds, starting)) is None:
                    raise UserError(f"{size:g} MB take hardly longer than starting does: give more --megabytes")
                rates.append((read - base_megabytes) / own)
                most = built[workers].peak_bytes
                memory = ratio("peak memory ÷ bound", [most], [bound], 1, less_is_better=True)
                cases.append(
                    Case(
                        name=f"{read:,.0f} MB",
                        axis="input, MB",
                        at=round(read, 3),
                        series=[
                            series("measured", "throughput", "MB/s per core", rates[-1]),
                            series("measured", "peak memory", "bytes", most),
                            series("stated bound", "peak memory", "bytes", bound, kind="computed"),
                            series("processor, one worker", "time", "s", built[1].cpu_seconds),
                            *times,
                        ],
                        ratios=[memory],
                        setting={"documents": documents, "largest_document_bytes": largest},
                    )
                )
                progress.advance()
    ratios = [ratio("fastest ÷ slowest", [max(rates)], [min(rates)], 1 + TOLERANCE, less_is_better=True)]
    if workers > 1:
        of = f"one worker's time ÷ that of {workers} at {sizes[-1]:,g} MB"
        ratios.append(ratio(of, [built[1].seconds], [built[workers].seconds], WORKERS_GOAL * workers))
        of = f"time of {workers} builds at once ÷ that of {workers} workers, for as much text"
        ratios.append(ratio(of, [together / workers], [built[workers].seconds], WORKERS_GOAL))
    return Benchmark(
        benchmark="data-scale",
        title="Data pipeline against the size of its input",
        cases=[*cases, Case(name="all sizes", ratios=ratios)],
        notes=NOTES["data-scale"],
        setting={
            "corpus": {"name": corpus.name, "sha256": sha256_file(corpus)},
            "workers": workers,
            "vocabulary": vocabulary.description,
            "base_megabytes": round(base_megabytes, 3),
            "base_seconds": round(starting, 3),
        },
    )


def _seconds_together(corpus: Path, vocabulary: str, folder: Path, count: int) -> float:
    """The time in which so many builds by one worker each, all begun at once, are finished: what the machine allows."""
    start = time.monotonic()
    with ThreadPoolExecutor(count) as pool:
        datasets = [
            dataset for _, dataset in pool.map(lambda _: run_pipeline(corpus, vocabulary, folder), range(count))
        ]
    seconds = time.monotonic() - start
    for dataset in datasets:
        shutil.rmtree(dataset.parent)
    return seconds


def write_corpus(path: Path, paragraphs: Sequence[str], megabytes: float) -> tuple[Path, int, int]:
    """A corpus of about that size; its path, number of documents and largest document in bytes."""
    chance = random.Random(SEED)
    written = documents = largest = 0
    with path.open("wb") as file:
        while written < megabytes * 1e6:
            text = "\n\n".join(chance.choices(paragraphs, k=chance.randint(*PARAGRAPHS)))
            line = json.dumps({"text": text}, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
            written += file.write(line)
            documents += 1
            largest = max(largest, len(line))
    return path, documents, largest


def _paragraphs(corpus: Path) -> list[str]:
    paragraphs = {
        part.strip()
        for text in read_texts(corpus)[0]
        for part in text.split("\n\n")
        if 200 <= len(part.strip()) <= 4000
    }
    if len(paragraphs) < 100:
        raise BadInput(
            f"{corpus} has {len(paragraphs)} paragraphs of 200 to 4000 characters, too few to make a corpus of"
        )
    return sorted(paragraphs)


def memory_bound_bytes(documents: int, largest_document_bytes: int, workers: int) -> int:
    """The most memory that all processes of a build hold together, whatever the size of the corpus.

    40 bytes for each document in the process that links them, and for each worker 0.7 GB and 12 times its largest
    document. The process that hands out work counts as a worker if there are several.
    """
    processes = workers + 1 if workers > 1 else 1
    each = WORKER_BYTES + LARGEST_DOCUMENT_FACTOR * largest_document_bytes
    return processes * each + DOCUMENT_BYTES * documents
