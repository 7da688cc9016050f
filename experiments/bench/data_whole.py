"""The pipeline as users run it, on one core, and the programs it is compared with: each in processes of its own."""

import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from experiments.bench.timing import series
from lineage.benchmark import Series
from lineage.errors import UserError

OURS, PLAIN, FASTER = "ours", "plain", "times faster"
SECONDS, HOURS = "processor s", "174 GB"
PAPER_GIGABYTES = 174
OFFLINE = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
FEW_DOCUMENTS, FEW_CHARACTERS = 10, (1000, 4000)
"""Of the corpus whose run shows what starting costs, and how long they are."""
LEAST_SHARE = 0.25
"""Of what starting takes, which differs from run to run: what costs less is not told apart from it."""


def core_hours(cpu_seconds: float, megabytes: float) -> float:
    """Core-hours that the paper's 174 GB take at this rate."""
    return cpu_seconds / megabytes * PAPER_GIGABYTES * 1000 / 3600


def answers(compared: int, differing: int) -> list[Series]:
    """How many answers were compared, and how many differ."""
    return [series("compared", "answers", "", compared), series("differing", "answers", "", differing)]


def write_recipe(path: Path, corpus: Path, vocabulary: str, workers: int) -> Path:
    """The default recipe on a corpus; `vocabulary` is the TOML of its tokenizer section."""
    path.write_text(
        f'name = "bench"\nworkers = {workers}\n[sources]\nnames = [{json.dumps(f"jsonl:{corpus.absolute()}")}]\n'
        f"[tokenizer]\n{vocabulary}\n",
        encoding="utf-8",
    )
    return path


def run_pipeline(corpus: Path, vocabulary: str, folder: Path) -> tuple[float, Path]:
    """Processor seconds of `mlm-data run` with one worker, every process and file of it included; its dataset."""
    work = Path(tempfile.mkdtemp(dir=folder))
    recipe = write_recipe(work / "recipe.toml", corpus, vocabulary, workers=1)
    program = Path(sys.executable).with_name("mlm-data")
    return _program(program, "run", recipe, "--runs", work / "runs")[0], work / "runs" / "bench"


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


def run_datatrove(corpus: Path, tokenizer: Path, work: Path) -> dict[str, float] | None:
    """Processor seconds of datatrove's stages; None where it or its word tokenizer is not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("datatrove", "spacy")):
        return None
    printed = _program(sys.executable, "-m", "experiments.bench.data_datatrove", corpus, tokenizer, work)[1]
    return dict(json.loads(printed.splitlines()[-1]))


def datatrove_version() -> str:
    """As installed."""
    return version("datatrove")


def write_few(path: Path, texts: Sequence[str]) -> Path:
    """A corpus of a few of the texts, each again with a word more: near-duplicates too, so that no code is left out."""
    least, most = FEW_CHARACTERS
    few = [text[:most] for text in texts if len(text) >= least][:FEW_DOCUMENTS] or texts[:FEW_DOCUMENTS]
    lines = [json.dumps({"text": each}) + "\n" for text in few for each in (text, f"{text} Indeed.")]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def _program(*arguments: Any) -> tuple[float, str]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [str(argument) for argument in arguments], env=os.environ | OFFLINE, capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise UserError(f"{Path(arguments[0]).name} {' '.join(map(str, arguments[1:3]))} failed: {lines[-1]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout
