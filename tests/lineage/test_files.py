"""Every key of the files that rooms hand on is a field of the class with which they are read."""

import json
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.files import DataCard, Ledger, StageAttrition
from engine.run.files import METRICS, SUMMARY, TIMELINE, Step, Timeline, TrainingSummary, Validation
from lineage.errors import IntegrityFailure
from lineage.files import FileSchema, Manifest, parse_document, read_document
from lineage.run import MANIFEST
from tests.data_pipeline.builds import build, config_for, write_mixed
from tests.engine.conftest import write_dataset
from tests.engine.small_run import small_config, train

LINES = {"train": Step, "validation": Validation, "final-validation": Validation}


def assert_whole(values: Any, model: type[FileSchema], *lacking: str) -> None:
    """The class has a field for every key, at every depth, and but for those that lack a key for every field."""
    assert set(model.model_fields) - set(lacking) == set(values)
    read = parse_document(values, model, "the file")
    assert json.dumps(read.to_json()) == json.dumps(values)  # an unknown key would be lost; the order is kept


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training run of two iterations."""
    dataset = write_dataset(tmp_path_factory.mktemp("words"))
    config = small_config(dataset, iterations=2, warmup_iterations=1, checkpoint_interval=2)
    return train(config, tmp_path_factory.mktemp("runs")).path


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of all stages."""
    folder = tmp_path_factory.mktemp("corpus")
    return build(folder, config_for(f"jsonl:{write_mixed(folder, 60)}"), "runs")


@pytest.mark.parametrize(("name", "model"), [(MANIFEST, Manifest), (SUMMARY, TrainingSummary), (TIMELINE, Timeline)])
def test_a_training_run_is_read_whole(name: str, model: type[FileSchema], run: Path) -> None:
    assert_whole(json.loads((run / name).read_text(encoding="utf-8")), model)


def test_every_line_of_the_metrics_is_read_whole(run: Path) -> None:
    optional = {"train": ("warning", "gradient_square", "gradient_variance", "noise_scale")}
    lines = [json.loads(line) for line in (run / METRICS).read_text(encoding="utf-8").splitlines()]
    assert {line["kind"] for line in lines} == set(LINES)
    for line in lines:
        assert_whole(line, LINES[line["kind"]], *optional.get(line["kind"], ()))


@pytest.mark.parametrize(("name", "model"), [(MANIFEST, Manifest), ("ledger.json", Ledger), ("dataset.json", DataCard)])
def test_a_dataset_is_read_whole(name: str, model: type[FileSchema], dataset: Path) -> None:
    assert_whole(json.loads((dataset / name).read_text(encoding="utf-8")), model)


def test_what_was_not_given_is_not_written() -> None:
    step = Step(kind="train", iteration=1, loss=2.0, learning_rate=0.1, gradient_norm=None, seconds=1.0,
                tokens_per_second=1.0, model_tflops=1.0)  # fmt: skip
    assert "noise_scale" not in step.to_json()
    assert '"gradient_norm": null' in step.to_line()
    step.noise_scale = None
    assert step.to_json()["noise_scale"] is None


def test_a_key_without_a_field_is_noticed() -> None:
    values = {
        "name": "clean",
        "documents_in": 2,
        "documents_out": 1,
        "dropped": {"empty": {"documents": 1, "bytes": 5, "tokens": None}},
    }
    lacking = set(StageAttrition.model_fields) - set(values)
    assert_whole(values, StageAttrition, *lacking)
    with pytest.raises(AssertionError):
        assert_whole(values | {"dropped": {"empty": {"documents": 1, "letters": 1}}}, StageAttrition, *lacking)


def test_a_file_that_is_none_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"parameters": "many"}')
    with pytest.raises(IntegrityFailure, match=r"^summary.json is not what it should be: parameters: "):
        read_document(tmp_path / "summary.json", TrainingSummary)
