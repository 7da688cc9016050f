"""`mlm-experiment run gpt2/released`: found weights become sealed records and verdicts; a stand-in
answers no claim."""

import shutil
from functools import partial
from pathlib import Path

import pytest

from mlm_repro.experiments.catalogue import find_experiment
from mlm_repro.experiments.cli import main
from mlm_repro.experiments.files import STAND_IN
from mlm_repro.experiments.measured import released
from mlm_repro.experiments.verdicts import Verdict, judge, load_results
from mlm_repro.lineage.digest import sha256_file
from mlm_repro.lineage.errors import DataMissing
from mlm_repro.lineage.records import read_records
from tests.commands import Command
from tests.evaluation.test_harness import directory  # noqa: F401

pytest.importorskip("transformers")


@pytest.fixture
def mlm_experiment(command: Command) -> Command:
    return partial(command, main, "mlm-experiment")


@pytest.fixture
def models(
    directory: Path,  # noqa: F811
    nine_articles: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    folder = tmp_path / "models"
    shutil.copytree(directory, folder / "gpt2")
    monkeypatch.setenv("MLM_MODELS_DIR", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return folder


def verdicts(runs: Path) -> dict[str, Verdict]:
    found = judge([find_experiment("gpt2/released")], load_results([runs]))
    return {verdict.claim.id: verdict for verdict in found}


def test_a_stand_in_is_scored_and_answers_nothing(
    models: Path, tmp_path: Path, mlm_experiment: Command
) -> None:
    said = mlm_experiment(
        "run", "gpt2/released", "--limit", 9, "--runs", tmp_path / "runs", ends=0
    ).out
    assert "gpt2-xl: not under $MLM_MODELS_DIR" in said
    run = tmp_path / "runs" / "experiment-gpt2-released-measured"
    records = read_records(run / "records.jsonl")
    assert [record.kind for record in records] == ["scaled"] * 5
    digest = sha256_file(models / "gpt2" / "model.safetensors")[:16]
    assert all(record.note.startswith(STAND_IN) and digest in record.note for record in records)
    found = verdicts(tmp_path / "runs")
    assert {verdict.outcome for verdict in found.values()} == {"not-tried"}
    assert STAND_IN in found["gpt-2/table-3/117m/wikitext103-ppl"].reason


def test_the_hub_s_own_file_is_measured_and_another_under_its_name_is_not(
    models: Path, tmp_path: Path, mlm_experiment: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"

    def from_cache(repository: str) -> Path:
        if repository != "openai-community/gpt2":
            raise DataMissing(repository)
        return cache

    shutil.move(models / "gpt2", cache)
    weights = cache / "model.safetensors"
    blob = tmp_path / sha256_file(weights)
    weights.rename(blob)
    weights.symlink_to(blob)
    monkeypatch.setattr(released, "cached_model", from_cache)
    mlm_experiment("run", "gpt2/released", "--runs", tmp_path / "runs", ends=0)
    assert (
        verdicts(tmp_path / "runs")["gpt-2/table-3/117m/wikitext103-ppl"].outcome == "contradicted"
    )
    weights.unlink()
    weights.symlink_to(blob.rename(tmp_path / ("0" * 64)))
    mlm_experiment("run", "gpt2/released", "--limit", 3, "--runs", tmp_path / "later", ends=0)
    assert {verdict.outcome for verdict in verdicts(tmp_path / "later").values()} == {"not-tried"}


def test_without_weights_the_reason_names_the_command(
    models: Path, tmp_path: Path, mlm_experiment: Command
) -> None:
    shutil.rmtree(models / "gpt2")
    done = mlm_experiment("run", "gpt2/released", "--runs", tmp_path / "runs")
    assert done.code not in (0, 1)
    assert "mlm-experiment run gpt2/released" in done.err
    (tmp_path / "runs").mkdir()
    assert (
        "`mlm-experiment run gpt2/released`"
        in verdicts(tmp_path / "runs")["gpt-2/table-3/345m/lambada-acc"].reason
    )
