"""A small corpus of English and a way to call the command line as a user does."""

import json
import random
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from mlm_repro.data_pipeline.cli import main
from mlm_repro.data_pipeline.contamination.words import Ngrams, words_of
from mlm_repro.data_pipeline.reading import hub
from tests.commands import Command

WORDS = re.findall(
    r"\w+",
    "the river of time and people in their houses with a small garden where children play every"
    " summer while old friends talk about weather music history bread morning light winter journey"
    " letters mountain village market story language science water bridge window kitchen teacher"
    " family answer question paper number island forest harbour captain engine railway station"
    " evening silence memory voice picture colour country city road field is was has been could"
    " would should because before after between under over many some few long short ",
)


def sentences(count: int, seed: int) -> str:
    """English words in sentences, the same for the same seed."""
    rng = random.Random(seed)
    made = (
        " ".join(rng.choice(WORDS) for _ in range(rng.randint(6, 14))).capitalize() + "."
        for _ in range(count)
    )
    return " ".join(made)


def write_jsonl(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def ngrams_in(passages: Sequence[str], length: int = 13, shortest: int = 8) -> Ngrams:
    """The n-grams of the passages that have at least `shortest` words."""
    texts = [words for words in map(words_of, passages) if len(words) >= shortest]
    return Ngrams(tuple(map(" ".join, texts)), length)


def write_recipe(path: Path, *sources: str, extra: str = "") -> Path:
    """A recipe over the sources with a small trained vocabulary; `extra` is more TOML."""
    names = json.dumps(sources)
    path.write_text(
        f'name = "small"\nworkers = 1\n{extra}\n[sources]\nnames = {names}\n'
        '[tokenizer]\nkind = "train"\nvocab_size = 300\n',
        encoding="utf-8",
    )
    return path


def jaccard(left: frozenset[str], right: frozenset[str]) -> float:
    """Shared shingles over all shingles, 0 to 1."""
    return len(left & right) / len(left | right)


@pytest.fixture
def cli(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> Command:
    """Run `mlm-data` in an empty directory, without test sets or hub unless a test provides
    them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("MLM_DATA_DIR", raising=False)
    hub.hub_is_reachable.cache_clear()
    return partial(command, main, "mlm-data")


def leftovers(root: Path) -> list[str]:
    """Names under a directory of runs; empty when nothing was left there."""
    return sorted(path.name for path in root.iterdir()) if root.exists() else []
