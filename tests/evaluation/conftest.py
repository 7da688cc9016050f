"""Fixtures: the published files where they are, and none where a test wants none."""

import os
from pathlib import Path

import pytest

from data_pipeline.tokens.tokenizer import Tokenizer
from tests.evaluation.standins import write_run


@pytest.fixture(scope="session")
def published() -> Path:
    """The directory of published files."""
    directory = os.environ.get("MLM_DATA_DIR")
    if not directory:
        pytest.skip("MLM_DATA_DIR does not name a directory with the published test files")
    return Path(directory)


@pytest.fixture(scope="session")
def gpt2_tokenizer(published: Path) -> Tokenizer:
    """OpenAI's vocabulary."""
    return Tokenizer.from_gpt2_files(published / "gpt2-bpe" / "vocab.json", published / "gpt2-bpe" / "merges.txt")


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
    monkeypatch.setattr("data_pipeline.contamination.testsets.hub_is_reachable", lambda: False)
    return data


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training run with one checkpoint, not to be changed."""
    return write_run(tmp_path_factory.mktemp("runs"))
