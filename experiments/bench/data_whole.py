"""The pipeline as users run it, on one core, and the programs it is compared with: each in processes of its own."""

import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.bench.timing import series
from lineage.benchmark import Series
from lineage.errors import UserError

OURS, PLAIN, FASTER = "ours", "plain", "times faster"
SECONDS, HOURS = "processor s", "174 GB"
PAPER_GIGABYTES = 174
OFFLINE = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
BASE_SHARE = 0.2
"""Of the documents: the run on them shows what does not grow with the corpus."""
REPEATED = 10
"""Documents of these that come again with a word more."""
POLL_SECONDS = 0.1
LEAST_SHARE = 0.25
"""Of what starting takes, which differs from run to run: what costs less is not told apart from it."""


def core_hours(cpu_seconds: float, megabytes: float) -> float:
    """Core-hours that the paper's 174 GB take at this rate."""
    return cpu_seconds / megabytes * PAPER_GIGABYTES * 1000 / 3600


def answers(compared: int, differing: int) -> list[Series]:
    """How many answers were compared, and how many differ."""
    return [series("compared", "answers", "", compared), series("differing", "answers", "", differing)]


def read_texts(corpus: Path) -> tuple[list[str], int]:
    """The texts of a .jsonl file, and how many lines have none."""
    from data_pipeline.document import Document
    from data_pipeline.reading.pieces import Piece
    from data_pipeline.reading.readers import Limits, read_pieces

    piece = Piece("jsonl", corpus.name, str(corpus), "", corpus.stat().st_size if corpus.is_file() else 0)
    every = list(read_pieces([piece], Limits()))
    texts = [each.text for each in every if isinstance(each, Document)]
    return texts, len(every) - len(texts)


class Spent(NamedTuple):
    """What a program took, with all that it started."""

    cpu_seconds: float
    seconds: float
    """Of the clock."""
    peak_bytes: int
    """Most resident memory of all processes together."""
    printed: str


def run_program(*arguments: Any, bound: int | None = None) -> Spent:
    """What a program takes; `bound` is the most data a process may hold. Raises UserError with its last line where it
    fails."""
    command = [str(argument) for argument in arguments]
    limit = (lambda: resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))) if bound else None
    before, start, peak = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic(), 0
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, env=os.environ | OFFLINE, stdout=out, stderr=said, preexec_fn=limit)
        while process.poll() is None:
            peak = max(peak, sum(map(_resident_bytes, _family(process.pid))))
            time.sleep(POLL_SECONDS)
        seconds, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        for file in (out, said):
            file.seek(0)
        if process.returncode:
            lines = said.read().strip().splitlines() or ["it said nothing"]
            raise UserError(f"{Path(command[0]).name} {' '.join(command[1:3])} failed: {lines[-1]}")
        cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Spent(cpu_seconds, seconds, peak, out.read())


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
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):  # it has ended
        return 0


def run_pipeline(
    corpus: Path, vocabulary: str, folder: Path, workers: int = 1, bound: int | None = None, settings: str = ""
) -> tuple[Spent, Path]:
    """What `mlm-data run` takes, every process and file of it included; its dataset. `settings` begin the recipe."""
    work = Path(tempfile.mkdtemp(dir=folder))
    recipe = work / "recipe.toml"
    recipe.write_text(
        f'name = "bench"\nworkers = {workers}\n{settings}\n'
        f"[sources]\nnames = [{json.dumps(f'jsonl:{corpus.absolute()}')}]\n"
        f"[tokenizer]\n{vocabulary}\n",
        encoding="utf-8",
    )
    program = Path(sys.executable).with_name("mlm-data")
    return run_program(program, "run", recipe, "--runs", work / "runs", bound=bound), work / "runs" / "bench"


def beyond_starting(seconds: float, starting: float) -> float | None:
    """What a run took besides starting; None if that is too little to be measured."""
    own = seconds - starting
    return own if own >= LEAST_SHARE * starting else None


def texts_of(dataset: Path) -> Counter[str]:
    """Every document of the dataset's splits."""
    return Counter(
        json.loads(line)["text"]
        for path in sorted((dataset / "documents").glob("**/*.jsonl"))
        for line in path.open(encoding="utf-8")
    )


def base_of(texts: Sequence[str]) -> list[str]:
    """A part of the texts, some again with a word more: near-duplicates too, so that no code is left out."""
    base = texts[: math.ceil(BASE_SHARE * len(texts))]
    return [*base, *(f"{text} Indeed." for text in base[:REPEATED])]


def write_texts(path: Path, texts: Sequence[str]) -> Path:
    """The texts as a corpus."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path
