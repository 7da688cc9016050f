"""Planted exchanges, each sealed anew: no digest of a single directory shows them, the chain
does."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlm_repro.lineage.chain import broken_links
from mlm_repro.lineage.digest import seal
from tests.engine.conftest import dataset, write_dataset  # noqa: F401
from tests.engine.small_run import small_config, train

SHORT = {"iterations": 6, "checkpoint_interval": 2, "keep_checkpoints": 3, "warmup_iterations": 1}
NAMES = ("iter_0000002", "iter_0000004", "iter_0000006")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run, the same from another seed, and the same on other data."""
    root = tmp_path_factory.mktemp("chain")
    data = [write_dataset(root / f"data-{seed}", seed) for seed in (0, 1)]
    return {
        "run": train(small_config(data[0], **SHORT), root / "run").path,
        "seed": train(small_config(data[0], **SHORT, seed=7), root / "seed").path,
        "data": train(small_config(data[1], **SHORT), root / "data").path,
        "anew": train(small_config(data[0], **SHORT), root / "anew").path,
    }


@pytest.fixture
def run(trained: dict[str, Path], tmp_path: Path) -> Path:
    shutil.copytree(trained["run"], tmp_path / trained["run"].name)
    return tmp_path / trained["run"].name


def exchange(source: Path, target: Path) -> None:
    shutil.rmtree(target)
    shutil.copytree(source, target)


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))
    change(values)
    path.write_text(json.dumps(values), encoding="utf-8")
    seal(path.parent)


def swapped(run: Path, others: dict[str, Path]) -> None:
    """As EleutherAI/pythia#108: a checkpoint was another step's weights."""
    first, second = (run / "checkpoints" / name for name in NAMES[:2])
    first.rename(run / "aside")
    second.rename(first)
    (run / "aside").rename(second)


def duplicated(run: Path, others: dict[str, Path]) -> None:
    """As EleutherAI/pythia#195: successive steps are byte-identical."""
    first, second = (run / "checkpoints" / name for name in NAMES[:2])
    for file in first.glob("*.safetensors"):
        shutil.copy(file, second)
    seal(second)


def begun_anew(run: Path, others: dict[str, Path]) -> None:
    """As EleutherAI/pythia#203: later steps do not descend from the first."""
    for name in NAMES[1:]:
        exchange(others["anew"] / "checkpoints" / name, run / "checkpoints" / name)


def without_parent(run: Path, others: dict[str, Path]) -> None:
    edit(
        run / "checkpoints" / NAMES[1] / "lineage.json", lambda values: values["ancestors"].clear()
    )


def of_another_seed(run: Path, others: dict[str, Path]) -> None:
    exchange(others["seed"] / "checkpoints" / NAMES[2], run / "checkpoints" / NAMES[2])


def of_other_data(run: Path, others: dict[str, Path]) -> None:
    exchange(others["data"] / "checkpoints" / NAMES[2], run / "checkpoints" / NAMES[2])


def another_model(run: Path, others: dict[str, Path]) -> None:
    """As EleutherAI/pythia#135: a field of the configuration was another."""
    edit(
        run / "checkpoints" / NAMES[2] / "config.json",
        lambda values: values["model"].update(init_std=0.5),
    )


def another_middle(run: Path, others: dict[str, Path]) -> None:
    edit(run / "checkpoints" / NAMES[1] / "state.json", lambda values: values.update(seconds=0.0))


def configuration(run: Path, others: dict[str, Path]) -> None:
    edit(run / "manifest.json", lambda values: values["config"]["train"].update(learning_rate=1.0))


def settings(run: Path, others: dict[str, Path]) -> None:
    edit(
        run / "manifest.json", lambda values: values["settings"]["train"].update(learning_rate=1.0)
    )


def inputs(run: Path, others: dict[str, Path]) -> None:
    edit(run / "manifest.json", lambda values: values["parents"].update(dataset="0" * 64))


def test_a_run_holds_together(run: Path) -> None:
    assert broken_links(run) == []


@pytest.mark.parametrize(
    ("corrupt", "sentence"),
    [
        (swapped, "iter_0000002 holds iteration 4: it was exchanged or copied"),
        (duplicated, "iter_0000004 has the same weights as iter_0000002"),
        (begun_anew, "iter_0000004 descends from another iter_0000002 ("),
        (
            without_parent,
            "iter_0000004 does not descend from iter_0000002: its parent is none: it began anew",
        ),
        (of_another_seed, "iter_0000006 belongs to another run, "),
        (of_other_data, "iter_0000006 was trained on other inputs: dataset"),
        (another_model, "iter_0000006: model: init_std is 0.5; the run's is 0.02"),
        (another_middle, "iter_0000006 descends from another iter_0000004 ("),
        (configuration, "the configuration in manifest.json is not the one its digest was made of"),
        (settings, "the train in `settings` of manifest.json is not the one in `config`"),
        (inputs, "the identity in manifest.json is not that of its configuration and inputs"),
    ],
)
def test_what_was_exchanged_and_sealed_anew_is_named(
    corrupt: Callable[[Path, dict[str, Path]], None],
    sentence: str,
    run: Path,
    trained: dict[str, Path],
) -> None:
    corrupt(run, trained)
    seal(run)
    assert [found for found in broken_links(run) if sentence in found], broken_links(run)
