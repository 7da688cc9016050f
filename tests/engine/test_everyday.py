"""Training as people do it every day: an own file, a changed schedule, weights from elsewhere, a
longer run."""

import re
import shlex
import shutil
import signal
import time
import tomllib
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import fmean

import pytest

from mlm_repro.engine.config import RecordConfig, RunConfig, TrainConfig
from mlm_repro.engine.run.files import read_metrics, read_steps
from mlm_repro.engine.run.resolved import default_ranks, read_run_config
from mlm_repro.lineage.config import override_config, parse_config, to_toml
from mlm_repro.lineage.errors import Interrupted
from mlm_repro.lineage.files import Manifest, read_document
from mlm_repro.lineage.run import RunDirectory
from mlm_repro.lineage.shipped import HOME, Shipped
from mlm_repro.verify import cli as verify_cli
from tests.commands import Program, call
from tests.engine.small_run import (
    LONG,
    MODEL,
    finish,
    mlm_train,
    small_config,
    start,
    train,
    wait_for_iteration,
    write_toml,
)


@pytest.fixture
def own(dataset: Path, tmp_path: Path) -> Path:
    """A configuration as somebody writes it, which names no precision."""
    path = write_toml(tmp_path / "own.toml", dataset, iterations=6, warmup_iterations=2)
    path.write_text(path.read_text().replace("precision = 'fp32'\n", ""))
    return path


def test_an_own_file_trains_in_the_format_of_the_device(own: Path, tmp_path: Path) -> None:
    code, _, err = mlm_train(own, "--runs", tmp_path, "--ranks", 1)
    assert (code, "warning" in err) == (0, False), err
    steps = read_steps(tmp_path / "small")
    assert not any(step.skipped for step in steps)
    assert steps[-1].loss < steps[0].loss - 0.2
    assert TrainConfig().precision == "fp32"


@pytest.mark.parametrize(
    ("scale", "code", "words"),
    [
        (2.0**32, 3, "error: none of the 6 iterations changed the weights, so nothing was trained"),
        (
            2.0**24,
            0,
            r"warning: \d of 16 iterations did not change the weights: gradients overflowed",
        ),
        (2.0**16, 0, "warning: fp16 takes about eleven times as long"),
    ],
)
def test_updates_that_fp16_leaves_out_are_said(
    scale: float, code: int, words: str, own: Path, tmp_path: Path
) -> None:
    iterations = 16 if scale == 2.0**24 else 6
    values = {"precision": "fp16", "initial_loss_scale": scale, "iterations": iterations}
    settings = [word for key, value in values.items() for word in ("--set", f"train.{key}={value}")]
    ended, _, err = mlm_train(own, *settings, "--runs", tmp_path, "--ranks", 1)
    assert ended == code
    assert re.search(words, err)
    assert ("did not change the weights" in err) == (scale == 2.0**24)


def test_the_console_shows_what_a_person_watches(
    dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("mlm_repro.lineage.progress.WRITTEN_SECONDS", 0.0)
    train(
        small_config(dataset, iterations=16, precision="fp16", initial_loss_scale=2.0**24), tmp_path
    )
    lines = [line for line in capfd.readouterr().err.splitlines() if " left | " in line]
    for words in (
        "gradient norm not finite",
        r"gradient norm \d",
        r"loss scale 1\.67772e\+07",
        r"\d skipped",
        "lr 3",
        r" \S+ s/iteration",
        r"GFLOP/s",
    ):
        assert any(re.search(words, line) for line in lines), (words, lines)


def test_a_short_training_shows_its_losses_its_validations_and_what_it_came_to(
    dataset: Path, tmp_path: Path
) -> None:
    toml = write_toml(tmp_path / "small.toml", dataset)
    settings = [
        "--set=train.iterations=12",
        "--set=train.validation_interval=4",
        "--set=record.log_interval=5",
    ]
    code, out, err = mlm_train(
        toml, *settings, "--set=record.loggers=", "--ranks", 1, "--runs", tmp_path
    )
    assert code == 0, err
    run = Path(out.removeprefix("complete: ").strip())
    metrics = read_metrics(run)
    losses = [line["loss"] for line in metrics if line["kind"] == "train"]
    loss = {line["iteration"]: line["loss"] for line in metrics if line["kind"] == "validation"}
    for end in (5, 10):
        assert f"{end}/12 iterations" in err
        assert (
            f"| loss {fmean(losses[end - 5 : end]):.3f} (mean of the last 5), gradient norm" in err
        )
    assert f"validation after 8: loss {loss[8]:.4f}, the lowest, perplex" in err
    final, best = metrics[-1], min([*loss.items(), (12, metrics[-1]["loss"])], key=itemgetter(1))
    assert final["kind"] == "final-validation"
    trained, checkpoint, following = err.splitlines()[-3:]
    assert trained.startswith(
        f"trained: loss {losses[-1]:.4f} (last iteration); validation loss {final['loss']:.4f},"
        f" perplexity {final['perplexity']:.5g}, over {final['samples']} sequences; lowest"
        f" {best[1]:.4f} after {best[0]}"
    )
    assert checkpoint == f"checkpoint: {run}/checkpoints/iter_0000012"
    command = shlex.split(following.split("`")[1])
    assert call({}, *command, folder=tmp_path, ends=0).out


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_signals_of_schedulers_stop_with_a_checkpoint(
    number: int, ranks: int, dataset: Path, tmp_path: Path
) -> None:
    process = start(
        write_toml(tmp_path / "small.toml", dataset),
        "--runs",
        tmp_path,
        "--ranks",
        ranks,
        "--set=train.iterations=2000",
        "--set=train.validation_interval=2000",
        "--set=train.checkpoint_interval=2000",
    )
    wait_for_iteration(process, tmp_path / "small", 5)
    process.send_signal(number)
    code, _, err = finish(process)
    assert (code, "stopped after iteration" in err) == (7, True), err
    assert list((tmp_path / "small" / "checkpoints").glob("iter_*/COMPLETE"))


def test_a_written_configuration_is_read_as_it_was() -> None:
    for values in ({}, {"precision": "fp16"}, {"precision": "fp16", "initial_loss_scale": 2.0**32}):
        config = parse_config({"name": "x", "model": MODEL, "train": values}, RunConfig, "here")
        written = config.model_dump(mode="json")
        assert RunConfig.model_validate(written) == config
        assert f'precision = "{config.train.precision}"' in to_toml(config) or not values


def test_a_title_of_any_characters_is_written_as_toml() -> None:
    config = parse_config(
        {"name": "x", "model": MODEL, "data": {"dataset": 'texts 🙂 "é\\'}}, RunConfig, "here"
    )
    assert parse_config(tomllib.loads(to_toml(config)), RunConfig, "there") == config


@pytest.mark.parametrize("path", sorted(HOME.glob(Shipped.MODEL)), ids=lambda path: path.stem)
def test_a_shipped_recipe_is_written_as_toml_that_reads_as_it(path: Path) -> None:
    config = read_run_config(path)
    assert parse_config(tomllib.loads(to_toml(config)), RunConfig, path.name) == config


def test_a_run_is_resumed_by_its_short_name_at_the_layout_that_trained_last(
    dataset: Path, tmp_path: Path
) -> None:
    config = small_config(dataset, **LONG)

    with pytest.raises(Interrupted):
        train(config, tmp_path, until=80)
    resume = ("resume", tmp_path / "small")
    process = start(*resume, "--set", "parallel.pp=2", "--set", "parallel.tp=1")
    wait_for_iteration(process, tmp_path / "small", 90)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 7
    assert mlm_train(*resume)[0] == 0
    manifest = read_document(tmp_path / "small" / "manifest.json", Manifest)
    began = {(one.parallel["pp"], one.ranks): one.iteration for one in reversed(manifest.attempts)}
    # A changed layout takes as many ranks as this machine has cores for.
    ranks = default_ranks(override_config(config, ["parallel.pp=2"]))
    assert began == {(1, 1): 0, (2, ranks): 80}
    assert len(manifest.attempts) == 3
    assert RunDirectory(tmp_path / "small").is_complete
    out = call({}, "mlm-verify", "run", tmp_path / "small").out
    lines = [line for line in out.splitlines() if line.startswith("attempt ")]
    for line, each in zip(lines, manifest.attempts, strict=True):
        assert f"from iteration {each.iteration} on {each.ranks} ranks" in line
        assert all(word in line for word in (each.code[:8], each.release, *each.command))
        assert each.versions["torch"] in line
    code, _, err = mlm_train(*resume, "--set", "train.learning_rate=1")
    assert (code, "`mlm-train run CONFIG --continue" in err) == (2, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--set train.lr=1", "unknown key 'train.lr'; this program's key is train.learning_rate"),
        (
            "--set train.gradient_accumulation_steps=4",
            "this program's key is train.global_batch_size, the sequences of an update",
        ),
        (
            "--lr 3",
            (
                "`mlm-train run` has no option --lr: it takes a setting of the recipe as --set"
                " KEY=VALUE, and here it is train.learning_rate"
            ),
        ),
        (
            "--ranks 8 --set train.microbatch_size=8",
            "make microbatch_size smaller, or the number of ranks tp × pp times one of 1",
        ),
        ("--ranks 2 --set parallel.tp=2 --set model.vocab_size=291", "contradicts the dataset"),
        ("--set model.vocab_size=100", "with which it is 290: leave it out"),
        (
            "--set train.learning_rate=5e-6",
            "min_learning_rate = 0.0001, the floor of the schedule, is above",
        ),
        (
            "--set model.seq_length=6000",
            "validation split has 5442 tokens, and one sequence needs 6000 + 1",
        ),
        (
            "--set model.family=transformer-xl --continue {run}",
            "--continue does not take a transformer-xl",
        ),
        ("--set record.loggers=tensorboard --set record.loggers=nothing", "record.loggers"),
    ],
)
def test_a_mistake_gets_the_sentence_that_helps(
    words: str, said: str, dataset: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    toml = write_toml(tmp_path / "small.toml", dataset)
    code, _, err = mlm_train("run", toml, "--dry-run", *words.format(run=uninterrupted).split())
    assert (code, said in err) == (2, True), err


def test_what_is_counted_is_the_dataset_s(dataset: Path, tmp_path: Path) -> None:
    toml = write_toml(tmp_path / "small.toml", dataset)
    assert "--vocab-size 290" in mlm_train("to-megatron", toml)[1]
    assert parse_config({"loggers": "tensorboard"}, RecordConfig, "here").loggers == (
        "tensorboard",
    )


def test_documents_that_were_not_divided_say_what_to_do(dataset: Path, tmp_path: Path) -> None:
    whole = Path(shutil.copytree(dataset, tmp_path / "tok"))
    for path in whole.glob("*_text_document.*"):
        path.rename(path.with_name(path.name.replace("train", "all").replace("valid", "other")))
    code, _, err = mlm_train("run", write_toml(tmp_path / "small.toml", whole))
    assert (
        code,
        "divide the documents with `mlm-data split` before `mlm-data tokenize`" in err,
    ) == (5, True)


def stand_still(sign: Path) -> None:
    """Have `mlm-verify` make the file `sign` and wait for ten minutes where it would say what it
    reads: it might end before a signal comes."""

    def wait(*parts: str) -> None:
        sign.touch()
        time.sleep(600)

    verify_cli.announce = wait


def test_a_command_that_keeps_nothing_does_not_promise_to_continue(tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    process = Program("mlm-verify", "run", "results", prepare=partial(stand_still, sign))
    while not sign.exists():
        assert process.poll() is None, process.err
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == Interrupted.exit_code
    assert "begins anew" in process.err
