"""Throughput and memory of the data pipeline against the size of its input."""

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from experiments.bench.data_whole import OFFLINE, beyond_starting, write_few, write_recipe
from experiments.bench.timing import ratio, series
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
POLL_SECONDS = 0.1
WORKER_BYTES = 700_000_000
"""A worker with every library, table and n-gram of the test sets loaded."""
LARGEST_DOCUMENT_FACTOR = 12
DOCUMENT_BYTES = 40
"""Arrays of document numbers, in one process at a time."""
NOTES = (
    "A corpus of a given size is made of paragraphs of the named one, drawn at random for each document, so that few "
    "documents are near-duplicates at any size.",
    "Throughput is that of the megabytes beyond a base of 2 MB for each worker, in which all of them start: processor "
    "seconds of every process. Memory is the resident memory of all processes together, the most at any moment, "
    "mapped files and libraries included; no process may hold more data than the bound.",
)


def measure(
    corpus: Annotated[Path, typer.Option("--corpus", help="A .jsonl file whose paragraphs the corpora are made of.")],
    megabytes: Annotated[list[float] | None, typer.Option(help="Size of a corpus; may be repeated.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
) -> Benchmark:
    """Throughput and peak memory of the data pipeline at 20, 200 and 2,000 MB, held to the stated bound."""
    from data_pipeline.runner import ROOM_OF_A_DATASET
    from experiments.bench.data_chain import choose_vocabulary

    paragraphs, sizes = _paragraphs(corpus), megabytes or SIZES
    announce(
        f"builds datasets of {', '.join(f'{size:g}' for size in sizes)} MB on {workers} processes",
        f"up to {format_bytes((1 + ROOM_OF_A_DATASET) * 1e6 * max(sizes))} of disk",
    )
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        base = write_corpus(work / "base.jsonl", paragraphs, BASE_MEGABYTES * workers)[0]
        base_megabytes = base.stat().st_size / 1e6
        texts = ["\n\n".join(paragraphs[at : at + 8]) for at in range(0, len(paragraphs), 8)]
        vocabulary = choose_vocabulary(_texts(base))
        few = write_few(work / "few.jsonl", texts)
        _build(few, vocabulary.recipe_of_few, workers, None)  # machine code is compiled and kept
        starting = _build(base, vocabulary.recipe, workers, None)["cpu_seconds"]
        rows = []
        with Progress("data-scale", len(sizes), "corpora") as progress:
            for size in sizes:
                path, documents, largest = write_corpus(work / "corpus.jsonl", paragraphs, size)
                bound = memory_bound_bytes(documents, largest, workers)
                built = _build(path, vocabulary.recipe, workers, bound)
                read = path.stat().st_size / 1e6
                if (own := beyond_starting(built["cpu_seconds"], starting)) is None:
                    raise UserError(f"{size:g} MB take hardly longer than starting does: give more --megabytes")
                rows.append(
                    {"megabytes": round(read, 3), "documents": documents, "largest_document_bytes": largest}
                    | built
                    | {"megabytes_per_second": round((read - base_megabytes) / own, 3), "bound_bytes": bound}
                )
                progress.advance()
    return Benchmark(
        benchmark="data-scale",
        title="Data pipeline against the size of its input",
        cases=summarize(rows),
        notes=list(NOTES),
        setting={
            "corpus": {"name": corpus.name, "sha256": sha256_file(corpus)},
            "workers": workers,
            "vocabulary": vocabulary.description,
            "base_megabytes": round(base_megabytes, 3),
            "base_seconds": round(starting, 3),
        },
    )


def summarize(rows: Sequence[dict[str, Any]]) -> list[Case]:
    """A case for each size, and one for all, which says whether the throughput is the same at each."""
    rates = [row["megabytes_per_second"] for row in rows]
    sizes = [
        Case(
            name=f"{row['megabytes']:,.0f} MB",
            axis="input, MB",
            at=row["megabytes"],
            series=[
                series("measured", "throughput", "MB/s per core", row["megabytes_per_second"]),
                series("median of the sizes", "throughput", "MB/s per core", median(rates), kind="computed"),
                series("measured", "peak memory", "bytes", row["peak_bytes"]),
                series("stated bound", "peak memory", "bytes", row["bound_bytes"], kind="computed"),
                series("processors", "time", "s", row["cpu_seconds"]),
                series("clock", "time", "s", row["seconds"]),
            ],
            ratios=[ratio("peak memory ÷ bound", [row["peak_bytes"]], [row["bound_bytes"]], 1, less_is_better=True)],
            setting={name: row[name] for name in ("documents", "largest_document_bytes")},
        )
        for row in rows
    ]
    spread = ratio("fastest ÷ slowest", [max(rates)], [min(rates)], 1 + TOLERANCE, less_is_better=True)
    return [*sizes, Case(name="all sizes", ratios=[spread])]


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


def _texts(corpus: Path) -> list[str]:
    from data_pipeline.document import Document
    from data_pipeline.reading.pieces import Piece
    from data_pipeline.reading.readers import Limits, read_pieces

    pieces = [Piece("jsonl", corpus.name, str(corpus), "", 0)]
    return [document.text for document in read_pieces(pieces, Limits()) if isinstance(document, Document)]


def _paragraphs(corpus: Path) -> list[str]:
    paragraphs = {
        part.strip() for text in _texts(corpus) for part in text.split("\n\n") if 200 <= len(part.strip()) <= 4000
    }
    if len(paragraphs) < 100:
        raise BadInput(
            f"{corpus} has {len(paragraphs)} paragraphs of 200 to 4000 characters, too few to make a corpus of"
        )
    return sorted(paragraphs)


def _build(corpus: Path, vocabulary: str, workers: int, bound: int | None) -> dict[str, Any]:
    """Wall and processor seconds and peak memory of a build; `bound` is the most data a process may hold."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = write_recipe(Path(folder) / "recipe.toml", corpus, vocabulary, workers)
        command = [str(Path(sys.executable).with_name("mlm-data")), "run", str(recipe), "--runs", folder]
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        process = subprocess.Popen(
            command, env=os.environ | OFFLINE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))) if bound else None,
        )  # fmt: skip
        peaks = [0]
        watcher = threading.Thread(target=_watch, args=(process, peaks), daemon=True)
        watcher.start()
        said = process.communicate()[1]
        watcher.join()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise UserError(f"building {corpus.name} failed: {(said.strip().splitlines() or ['it said nothing'])[-1]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(time.monotonic() - start, 3), "cpu_seconds": round(cpu, 3), "peak_bytes": peaks[0]}


def _watch(process: "subprocess.Popen[str]", peaks: list[int]) -> None:
    while process.poll() is None:
        peaks[0] = max(peaks[0], sum(map(_resident_bytes, _family(process.pid))))
        time.sleep(POLL_SECONDS)


def _family(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue
        for child in children:
            yield from _family(int(child))


def _resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields.get("VmRSS", "0").split()[0]) * 1024


def memory_bound_bytes(documents: int, largest_document_bytes: int, workers: int) -> int:
    """The most memory that all processes of a build hold together, whatever the size of the corpus.

    40 bytes for each document in the process that links them, and for each worker 0.7 GB and 12 times its largest
    document. The process that hands out work counts as a worker if there are several.
    """
    processes = workers + 1 if workers > 1 else 1
    each = WORKER_BYTES + LARGEST_DOCUMENT_FACTOR * largest_document_bytes
    return processes * each + DOCUMENT_BYTES * documents
