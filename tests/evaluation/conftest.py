"""Fixtures: no published files, made files that pass for them, a run."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlm_repro.data_pipeline.contamination.testsets import TEST_SETS
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.evaluation.cli import main
from mlm_repro.evaluation.protocol import SourceText
from mlm_repro.evaluation.tasks import wikitext103
from mlm_repro.evaluation.tasks.documents import RunningText
from mlm_repro.lineage.digest import sha256_file
from tests.commands import Command
from tests.made_data import wikitext

Evaluated = Callable[..., Any]


@pytest.fixture(scope="session")
def made_tokenizer(made_data: Path) -> Tokenizer:
    """The vocabulary of the made files."""
    return Tokenizer.from_gpt2_files(
        made_data / "gpt2-bpe" / "vocab.json", made_data / "gpt2-bpe" / "merges.txt"
    )


def pass_for_published(data: Path, monkeypatch: pytest.MonkeyPatch) -> RunningText:
    """The files in `data` are found, with their digests and counts as the expected ones; returns
    the WikiText."""
    monkeypatch.setenv("MLM_DATA_DIR", str(data))
    for name, file in TEST_SETS.items():
        monkeypatch.setitem(
            TEST_SETS, name, file.model_copy(update={"sha256": sha256_file(data / file.place)})
        )
    content = (data / TEST_SETS["wikitext103"].place).read_bytes().decode()
    text = RunningText.of_wikitext(SourceText("made", "made", ""), content)
    monkeypatch.setattr(wikitext103, "TEST_FILE_SHA256", TEST_SETS["wikitext103"].sha256)
    monkeypatch.setattr(wikitext103, "NUM_ORIGINAL_TOKENS", text.num_original_tokens)
    monkeypatch.setattr(wikitext103, "NUM_LM_EVAL_WORDS", text.num_lm_eval_words)
    return text


@pytest.fixture
def made_passes_for_published(made_data: Path, monkeypatch: pytest.MonkeyPatch) -> RunningText:
    """The made files pass for the published ones; returns the made WikiText."""
    return pass_for_published(made_data, monkeypatch)


@pytest.fixture
def nine_articles(made_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Nine articles that pass for WikiText-103's test file."""
    shutil.copytree(made_data, tmp_path / "data")
    (tmp_path / "data" / TEST_SETS["wikitext103"].place).write_bytes(wikitext(9, seed=1).encode())
    return pass_for_published(tmp_path / "data", monkeypatch).text


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores kept by one test are not those of another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def nothing_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data directory, an empty home and no hub; returns the data directory."""
    data = tmp_path / "data"
    data.mkdir()
    monkeypatch.setenv("MLM_DATA_DIR", str(data))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(
        "mlm_repro.data_pipeline.contamination.testsets.hub_is_reachable", lambda: False
    )
    return data


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training run with one checkpoint, not to be changed."""
    from tests.evaluation.standins import write_run

    return write_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The oracle's directory, not to be changed."""
    from mlm_repro.evaluation.conventions.oracle import write_oracle

    out = tmp_path_factory.mktemp("oracle") / "oracle"
    write_oracle(out)
    return out


@pytest.fixture
def mlm_eval(command: Command) -> Command:
    """Run `mlm-eval` in this process."""
    return partial(command, main, "mlm-eval")


@pytest.fixture
def evaluated(mlm_eval: Command, tmp_path: Path) -> Evaluated:
    """Run `mlm-eval` in this process with one worker, unless told otherwise; what it wrote."""

    def evaluate(verb: str, *words: object) -> Any:
        target = tmp_path / "deep" / "result.json"
        target.unlink(missing_ok=True)
        mlm_eval(verb, "--set", "workers=1", *words, "--json", target, ends=0)
        return json.loads(target.read_text())

    return evaluate
