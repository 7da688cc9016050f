"""The tables of keys name exactly what stands in files that were really written."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.rooms import ROOT
from tests.engine.conftest import write_dataset
from tests.engine.small_run import small_config, train

PAGE = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
KEPT = ROOT / "results" / "reproduce-8.3b"


def tables(heading: str) -> list[dict[str, str]]:
    """The tables below a heading: what stands in the first column's backticks, with the last column."""
    (part,) = re.findall(rf"^###? {re.escape(heading)}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    found = []
    for table in re.findall(r"^\|---.*\n((?:\|.*\n)+)", part, re.MULTILINE):
        rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
        found.append({key: row[-1] for row in rows for key in names(row[0])})
    return found


def names(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def read(path: Path) -> Any:
    """A JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training run of two iterations."""
    dataset = write_dataset(tmp_path_factory.mktemp("dataset"))
    config = small_config(dataset, iterations=2, warmup_iterations=1, checkpoint_interval=2)
    return train(config, tmp_path_factory.mktemp("runs")).path


@pytest.mark.parametrize("name", ["COMPLETE", "dataset.json", "ledger.json"])
def test_keys_of_a_run_and_its_dataset(name: str) -> None:
    (table,) = tables(name)
    later = {"english"} if name == "dataset.json" else set()
    assert set(table) == set(read(KEPT / name)) | later


def test_keys_of_a_stage() -> None:
    (table,) = tables("A stage of ledger.json")
    assert set(table) == set(read(KEPT / "ledger.json")["stages"][0])


def test_keys_of_the_metrics(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    iteration, validation = tables("metrics.jsonl")
    assert set(iteration) == set(next(line for line in lines if line["kind"] == "train"))
    assert {line["kind"] for line in lines} == {"train", "validation", "final-validation"}
    assert {frozenset(line) for line in lines if line["kind"] != "train"} == {frozenset(validation)}


@pytest.mark.parametrize("name", ["manifest.json", "timeline.json", "summary.json"])
def test_keys_of_a_training_run(run: Path, name: str) -> None:
    (table,) = tables(name)
    assert set(table) == set(read(run / name))


def test_files_and_keys_of_a_checkpoint(run: Path) -> None:
    checkpoint = run / "checkpoints" / "iter_0000002"
    (table,) = tables("Checkpoint")
    assert set(table) == {path.name for path in checkpoint.glob("*.json")}
    for name, content in table.items():
        found = read(checkpoint / name)
        if name in ("index.json", "statistics.json"):
            found = next(iter(found.values()))
        assert set(names(content)) == set(found), name
