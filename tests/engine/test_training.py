"""A training run: what it leaves behind, and that stopping it in any way changes nothing."""

import json
import math
import shutil
import signal
from pathlib import Path

import pytest
import torch

from mlm_repro.engine.costs import parameter_count
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.engine.pipeline.executor import PartitionedModel
from mlm_repro.engine.run.files import read_metrics, read_summary
from mlm_repro.engine.step import NotFinite
from mlm_repro.engine.trainer import Trainer
from mlm_repro.lineage.digest import check_seal
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.progress import format_duration
from tests.engine.small_run import (
    LONG,
    assert_same_training,
    curve,
    finish,
    mlm_train,
    resolved,
    small_config,
    start,
    train,
    wait_for_iteration,
    write_toml,
)


def test_a_finished_run_is_sealed_and_whole(uninterrupted: Path, dataset: Path) -> None:
    check_seal(uninterrupted)
    assert {path.name for path in uninterrupted.iterdir()} == {
        "COMPLETE",
        "manifest.json",
        "metrics.jsonl",
        "summary.json",
        "checkpoints",
    }
    assert uninterrupted.parent.joinpath("small").resolve() == uninterrupted.resolve()
    older, newest = sorted((uninterrupted / "checkpoints").iterdir())
    assert (older.name, newest.name) == ("iter_0000040", "iter_0000060")
    check_seal(newest)
    manifest = json.loads((uninterrupted / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["kind"] == "training"
    assert manifest["config"]["data"]["dataset"] == str(dataset)
    assert len(manifest["parents"]["dataset"]) == 64
    assert {path.name for path in newest.iterdir()} == {
        "COMPLETE",
        "index.json",
        "state.json",
        "config.json",
        "tokenizer",
        "statistics.json",
        "probe.json",
        "lineage.json",
        "model-tp00-pp000.safetensors",
        "optimizer-tp00-pp000.safetensors",
    }


def test_metrics_have_a_line_for_each_iteration_and_validation(uninterrupted: Path) -> None:
    lines = read_metrics(uninterrupted)
    trained = [line for line in lines if line["kind"] == "train"]
    assert [line["iteration"] for line in trained] == list(range(1, 61))
    assert [line["iteration"] for line in lines if line["kind"] == "validation"] == [0, 25, 50, 60]
    assert [line["kind"] for line in lines].count("final-validation") == 1
    assert (lines[0]["kind"], lines[0]["iteration"]) == ("validation", 0)
    assert lines[0]["loss"] == pytest.approx(math.log(290), abs=0.1)  # an untrained model guesses
    assert trained[-1]["loss"] < trained[0]["loss"] - 1
    for line in trained:
        assert line["gradient_norm"] > 0
        assert line["tokens_per_second"] == pytest.approx(8 * 32 / line["seconds"], rel=0.01)


def test_the_summary_is_that_of_the_metrics(uninterrupted: Path, dataset: Path) -> None:
    summary, final = read_summary(uninterrupted), read_metrics(uninterrupted)[-1]
    run = resolved(small_config(dataset))
    config, facts = run.config, run.data
    assert config.model.vocab_size == facts.vocab_size == 290
    assert config.model.padded_vocab_size == 384
    assert summary.parameters == parameter_count(config.model)
    assert summary.tokens == 60 * 8 * 32
    assert final["kind"] == "final-validation"
    assert summary.validation_loss == final["loss"]
    assert summary.validation_perplexity == pytest.approx(math.exp(final["loss"]))
    assert summary.validation_samples > 8  # the whole split
    assert summary.checkpoint == "iter_0000060"


def test_training_is_a_pure_function_of_the_seed(
    dataset: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    again = train(small_config(dataset), tmp_path).path
    assert again.name == uninterrupted.name
    assert_same_training(again, uninterrupted)
    other = train(small_config(dataset, seed=5, iterations=6, warmup_iterations=3), tmp_path).path
    assert other.name != again.name
    assert curve(other)[:3] != curve(again)[:3]


def test_sigterm_stops_and_resume_goes_on(
    dataset: Path, uninterrupted_long: Path, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / uninterrupted_long.name
    process = start(
        write_toml(tmp_path / "small.toml", dataset, **LONG), "--runs", run.parent, "--ranks", 1
    )
    wait_for_iteration(process, run, 3)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 7
    assert err.splitlines()[-1].startswith("error: stopped after iteration ")
    assert f"`mlm-train resume {run}`" in err
    assert not (run / "COMPLETE").exists()
    reached = int(err.split("after iteration ")[1].split(" of")[0])
    assert (run / "checkpoints" / f"iter_{reached:07d}" / "COMPLETE").exists()
    code, out, _ = mlm_train("resume", run, "--ranks", 1)
    assert (code, out) == (0, f"complete: {run}\n")
    assert_same_training(run, uninterrupted_long)
    code, out, _ = mlm_train("resume", run)
    assert (code, out) == (0, f"already complete: {run}\n")


@pytest.mark.parametrize("lost", [["COMPLETE"], ["COMPLETE", "summary.json"]])
def test_a_run_killed_while_it_is_sealed_is_finished(
    lost: list[str], dataset: Path, uninterrupted: Path, copied: Path
) -> None:
    for name in lost:
        (copied / name).unlink()
    train(small_config(dataset), copied.parent)
    check_seal(copied)
    assert_same_training(copied, uninterrupted)


def test_a_torn_last_line_of_metrics_is_written_again(
    dataset: Path, uninterrupted: Path, copied: Path
) -> None:
    shutil.rmtree(copied / "checkpoints" / "iter_0000060")
    (copied / "COMPLETE").unlink()
    text = (copied / "metrics.jsonl").read_text(encoding="utf-8")
    (copied / "metrics.jsonl").write_text(
        text[: text.index('"iteration": 52') + 30], encoding="utf-8"
    )
    train(small_config(dataset), copied.parent)
    assert curve(copied) == curve(uninterrupted)


def test_a_trainer_is_made_without_a_training_step(
    dataset: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes, reads checkpoints and writes from `prepare` on."""
    shutil.rmtree(copied / "checkpoints" / "iter_0000060")
    (copied / "COMPLETE").unlink()
    files = {path: path.stat().st_mtime_ns for path in copied.rglob("*")}
    run = resolved(small_config(dataset))
    with monkeypatch.context() as patch:
        patch.setattr(PartitionedModel, "forward_backward", None)
        patch.setattr(PartitionedModel, "evaluate", None)
        trainer = Trainer(run, run.begin(copied.parent), serial_mesh())
    assert trainer.state.iteration == 0
    assert {path: path.stat().st_mtime_ns for path in copied.rglob("*")} == files
    trainer.prepare()
    trainer.run_to_end()
    assert trainer.state.iteration == 60
    assert [line["iteration"] for line in read_metrics(copied) if line["kind"] == "train"] == list(
        range(1, 61)
    )


def test_the_first_estimate_counts_the_validation_of_the_whole_split(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(dataset, iterations=60, validation_interval=25, validation_samples=8)
    run = resolved(config)
    trainer = Trainer(run, run.begin(tmp_path), serial_mesh())
    trainer.rehearsed_seconds = 1.0
    monkeypatch.setattr(trainer.validation, "num_samples", 24_000)
    # 60 iterations of 8 sequences; a sequence that is validated runs forward alone, a third: of the
    # split, and of 8 at a time at the beginning and after 25 and 50 iterations.
    seconds = 60 + (24_000 + 3 * 8) / 8 / 3
    assert trainer._estimate(0).startswith(f"about {format_duration(seconds)} and ")


def test_an_infinite_loss_with_a_finite_gradient_updates_nothing(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = resolved(small_config(dataset))
    trainer = Trainer(run, run.begin(tmp_path), serial_mesh())
    before = [parameter.local.detach().clone() for parameter in trainer.model.parameters]
    [chunk] = trainer.model.chunks
    loss = chunk.batch_loss

    def broken(*arguments: torch.Tensor) -> torch.Tensor:
        return loss(*arguments) + (math.inf if chunk.training else 0.0)

    monkeypatch.setattr(chunk, "batch_loss", broken)
    trainer.prepare()
    with pytest.raises(NotFinite, match="iteration 1: loss inf"):
        trainer.run_to_end()
    after = [parameter.local for parameter in trainer.model.parameters]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_a_dataset_shorter_than_a_sample_is_refused(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="fewer than"):
        train(small_config(dataset, {"seq_length": 100_000}), tmp_path)
