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
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from data_pipeline.contamination.testsets import find_gpt2_vocabulary
from data_pipeline.tokens.tokenizer import Tokenizer
from experiments.bench.data_stages import in_kept_language
from lineage.errors import BadInput, DataMissing, UserError

OFFLINE = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
FEW_DOCUMENTS, FEW_CHARACTERS = 10, (1000, 4000)
"""Of the corpus whose run shows what starting costs, and how long they are."""
LEAST_SHARE = 0.25
"""Of what starting takes, which differs from run to run: what costs less is not told apart from it."""

TRAINED_SIZES = (8192, 4096, 2048, 1024, 512, 257)
"""Tokens of a vocabulary that is trained where GPT-2's is not here; any text gives the last, which is the bytes."""


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
