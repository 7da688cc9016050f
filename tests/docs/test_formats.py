"""The tables of keys and the schemas name exactly what stands in files that were really written."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mlm_repro.data_pipeline.files import DataCard, Ledger
from mlm_repro.engine.run.files import Step, TrainingSummary, Validation
from mlm_repro.lineage.errors import IntegrityFailure
from mlm_repro.lineage.files import FileSchema, Manifest, parse_document, read_document
from tests.architecture.rooms import ROOT
from tests.data_pipeline.builds import build, config_for, write_mixed
from tests.engine.conftest import write_dataset
from tests.engine.small_run import small_config, train

PAGE = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
KEPT = ROOT / "results" / "reproduce-8.3b"
SCHEMAS = {"manifest.json": Manifest, "summary.json": TrainingSummary}
LATER = {"warning"}
"""Fields of an iteration that are written where they are asked for."""


def check_schema(values: Any, model: type[FileSchema], *lacking: str) -> None:
    """The class has a field for every key at every depth, and every field but those lacking is
    there."""
    assert set(model.model_fields) - set(lacking) == set(values)
    read = parse_document(values, model, "the file")
    # An unknown key would be lost; the order is kept.
    assert json.dumps(read.to_json()) == json.dumps(values)


def tables(heading: str) -> list[dict[str, str]]:
    """The tables below a heading: what stands in the first column's backticks, with the last
    column."""
    (part,) = re.findall(
        rf"^###? {re.escape(heading)}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL
    )
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
    earlier = {"english"} if name == "dataset.json" else set()
    assert set(table) == set(read(KEPT / name)) - earlier


def test_keys_of_a_stage() -> None:
    (table,) = tables("A stage of ledger.json")
    assert set(table) == set(read(KEPT / "ledger.json")["stages"][0])


def test_keys_of_the_metrics(run: Path) -> None:
    lines = [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    iteration, validation = tables("metrics.jsonl")
    assert set(iteration) == set(next(line for line in lines if line["kind"] == "train"))
    assert {line["kind"] for line in lines} == {"train", "validation", "final-validation"}
    assert {frozenset(line) for line in lines if line["kind"] != "train"} == {frozenset(validation)}
    for line in lines:
        is_step = line["kind"] == "train"
        check_schema(line, Step if is_step else Validation, *(LATER if is_step else ()))


@pytest.mark.parametrize("name", SCHEMAS)
def test_keys_of_a_training_run(run: Path, name: str) -> None:
    (table,) = tables(name)
    assert set(table) == set(read(run / name))
    check_schema(read(run / name), SCHEMAS[name], *(["layouts"] if name == "manifest.json" else []))


def test_files_and_keys_of_a_checkpoint(run: Path) -> None:
    checkpoint = run / "checkpoints" / "iter_0000002"
    (table,) = tables("Checkpoint")
    assert set(table) == {path.name for path in checkpoint.glob("*.json")}
    for name, content in table.items():
        found = read(checkpoint / name)
        if name in ("index.json", "statistics.json"):
            found = next(iter(found.values()))
        assert set(names(content)) == set(found), name


def test_a_dataset_is_read_whole(tmp_path: Path) -> None:
    dataset = build(tmp_path, config_for(f"jsonl:{write_mixed(tmp_path, 60)}"), "runs")
    for name, model in (
        ("manifest.json", Manifest),
        ("ledger.json", Ledger),
        ("dataset.json", DataCard),
    ):
        check_schema(
            read(dataset / name), model, *(["layouts", "attempts"] if model is Manifest else [])
        )


def test_what_was_not_given_is_not_written() -> None:
    step = Step(
        kind="train",
        iteration=1,
        loss=2.0,
        learning_rate=0.1,
        gradient_norm=None,
        seconds=1.0,
        tokens_per_second=1.0,
        model_tflops=1.0,
    )
    assert "warning" not in step.to_json()
    assert '"gradient_norm": null' in step.to_line()


def test_a_file_that_is_none_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"parameters": "many"}')
    with pytest.raises(
        IntegrityFailure, match=r"^summary.json does not fit its schema: parameters: "
    ):
        read_document(tmp_path / "summary.json", TrainingSummary)
