"""A crawl of which half is one error page, and pages of three templates: the same bytes wherever
the work is done."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from benchmarks.corpora import texts, write_recipe
from mlm_repro.data_pipeline.config import DataConfig
from mlm_repro.data_pipeline.files import LEDGER, Ledger
from mlm_repro.data_pipeline.runner import build_dataset
from mlm_repro.lineage.config import load_config
from mlm_repro.lineage.files import read_document
from tests.data_pipeline.builds import files_of, in_child, ledger_of
from tests.data_pipeline.conftest import write_jsonl
from tests.data_pipeline.copies import start
from tests.data_pipeline.test_executors import cluster  # noqa: F401 (a fixture)
from tests.data_pipeline.test_resume import Killer

LINES, PAGES = 900, 450


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("crowded")
    mixed = [*texts("crawl", LINES), *texts("templates", PAGES)]
    random.Random(3).shuffle(mixed)
    source = write_jsonl(made / "corpus.jsonl", mixed)
    recipe = write_recipe(made, source)
    recipe.write_text(f"shard_bytes = 65536{recipe.read_text()}", encoding="utf-8")
    return made


def build(folder: Path, name: str, workers: int = 1, executor: str = "local") -> Path:
    config = load_config(folder / "recipe.toml", DataConfig, [f"workers={workers}"])
    return build_dataset(config, folder / name, executor).path


@pytest.fixture(scope="module")
def one_worker(folder: Path) -> Path:
    made = build(folder, "one")
    ledger = read_document(made / LEDGER, Ledger)
    dropped = ledger.stage("deduplicate").dropped["near-duplicate"].documents
    assert LINES // 2 - 1 <= dropped <= LINES // 2 + PAGES // 25
    assert len(ledger.shards) > 4
    return made


def same(made: Path, expected: Path) -> bool:
    return files_of(made) == files_of(expected) and ledger_of(made) == ledger_of(expected)


def test_two_workers(folder: Path, one_worker: Path) -> None:
    assert same(build(folder, "two", workers=2), one_worker)


@pytest.mark.parametrize("stage", ["link", "resolve", "decisions"])
def test_killed(folder: Path, one_worker: Path, stage: str) -> None:
    def build_until() -> None:
        sys.addaudithook(Killer(folder / f"killed-{stage}", stage))
        build(folder, f"killed-{stage}")

    assert os.WTERMSIG(in_child(build_until)) == signal.SIGKILL
    assert same(build(folder, f"killed-{stage}"), one_worker)


def test_parts(folder: Path, one_worker: Path) -> None:
    parts: list[subprocess.Popen[str]] = [
        start("run", "recipe.toml", "--runs", "parts", "--part", f"{number}/2", folder=folder)
        for number in (1, 2)
    ]
    assert [part.communicate(timeout=600)[1][-500:] for part in parts if part.wait(600)] == []
    assert same(folder / "parts" / one_worker.name, one_worker)


def test_two_nodes(folder: Path, one_worker: Path, cluster: Cluster) -> None:  # noqa: F811
    assert same(build(folder, "ray", executor="ray"), one_worker)
