"""Training from several datasets: shares and digests are recorded, and what does not fit is
refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mlm_repro.engine.config import DataSection, RunConfig
from mlm_repro.engine.data.dataset import DatasetFacts
from mlm_repro.engine.run.files import read_metrics
from mlm_repro.lineage.config import override_config, parse_config
from mlm_repro.lineage.digest import MARKER, seal
from mlm_repro.lineage.errors import BadInput
from tests.engine.conftest import write_dataset
from tests.engine.small_run import resolved, small_config, train


@pytest.fixture(scope="module")
def pair(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two datasets of one vocabulary: the second has the token files exchanged."""
    other = tmp_path_factory.mktemp("pair") / "other"
    shutil.copytree(dataset, other)
    for ending in ("bin", "idx"):
        train_file, valid_file = (
            other / f"{split}_text_document.{ending}" for split in ("train", "valid")
        )
        train_file.rename(other / "kept")
        valid_file.rename(train_file)
        (other / "kept").rename(valid_file)
    (other / MARKER).unlink()
    seal(other)
    return dataset, other


def blend(pair: tuple[Path, Path], first: float, second: float) -> RunConfig:
    data = DataSection(dataset=((pair[0], first), (pair[1], second)))
    return small_config(pair[0]).model_copy(update={"data": data})


def test_a_run_on_a_blend_records_it(pair: tuple[Path, Path], tmp_path: Path) -> None:
    run = train(blend(pair, 3, 1), tmp_path)
    manifest = json.loads((run.path / "manifest.json").read_text())
    parts = [DatasetFacts.read(directory) for directory in pair]
    assert manifest["config"]["data"]["dataset"] == [[str(pair[0]), 3.0], [str(pair[1]), 1.0]]
    assert manifest["parents"]["dataset 1"] == parts[0].digest
    assert manifest["parents"]["dataset 2"] == parts[1].digest
    assert manifest["parents"]["dataset"] not in (parts[0].digest, parts[1].digest)
    assert run.is_complete
    assert train(blend(pair, 3, 1), tmp_path).path == run.path
    assert train(blend(pair, 0.75, 0.25), tmp_path).path == run.path
    losses = [line["loss"] for line in read_metrics(run.path) if "loss" in line]
    assert np.isfinite(losses).all()


def test_other_weights_or_another_order_are_another_run(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    configs = [blend(pair, 3, 1), blend(pair, 1, 3), blend(pair[::-1], 3, 1), small_config(pair[0])]
    assert len({resolved(config).begin(tmp_path).path for config in configs}) == 4


def test_one_dataset_in_a_list_is_that_dataset(dataset: Path) -> None:
    alone, listed = DatasetFacts.read(dataset), DatasetFacts.read([(dataset, 5.0)])
    assert alone == listed
    assert alone.weights == (1.0,)
    assert alone.parents == {"dataset": alone.digest}


def test_different_vocabularies_are_refused(dataset: Path, tmp_path: Path) -> None:
    other = write_dataset(tmp_path / "other", seed=3)
    with pytest.raises(BadInput, match="have different vocabularies"):
        DatasetFacts.read([(dataset, 1.0), (other, 1.0)])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[]", "names no dataset"),
        ('[["a", 0]]', "must be above 0"),
        ('[["a", inf]]', "must be above 0"),
        ('[["a", 1.0], ["a", 2.0]]', "named twice"),
        ('[["a"]]', "neither the directory of a dataset nor a list"),
        ("7", "neither the directory of a dataset nor a list"),
    ],
)
def test_impossible_blends_are_refused(value: str, words: str, dataset: Path) -> None:
    with pytest.raises(BadInput, match=words):
        override_config(small_config(dataset), [f"data.dataset={value}"])


def test_a_blend_is_written_in_toml(dataset: Path) -> None:
    config = override_config(
        small_config(dataset), ['data.dataset=[["runs/a", 7], ["runs/b", 3.5]]']
    )
    assert config.data.dataset == ((Path("runs/a"), 7.0), (Path("runs/b"), 3.5))
    assert parse_config(config.model_dump(mode="json"), RunConfig, "manifest") == config
