"""Training as people do it every day: an own file, a changed schedule, weights from elsewhere, a longer run."""

import re
from pathlib import Path

import pytest

from engine.config import RunConfig, TrainConfig
from engine.run.files import read_steps
from lineage.config import parse_config, to_toml
from tests.engine.small_run import MODEL, mlm_train, small_config, train, write_toml


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
        (2.0**32, 3, "error: none of the 6 iterations made an update, so nothing was trained"),
        (2.0**24, 0, r"warning: \d of 16 iterations made no update: gradients overflowed"),
        (2.0**16, 0, "warning: fp16 takes about eleven times as long"),
    ],
)
def test_updates_that_fp16_leaves_out_are_said(scale: float, code: int, words: str, own: Path, tmp_path: Path) -> None:
    iterations = 16 if scale == 2.0**24 else 6
    values = {"precision": "fp16", "initial_loss_scale": scale, "iterations": iterations}
    settings = [word for key, value in values.items() for word in ("--set", f"train.{key}={value}")]
    ended, _, err = mlm_train(own, *settings, "--runs", tmp_path, "--ranks", 1)
    assert ended == code
    assert re.search(words, err)
    assert ("made no update" in err) == (scale == 2.0**24)


def test_the_console_shows_what_a_person_watches(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lineage.progress.WRITTEN_SECONDS", 0.0)
    train(small_config(dataset, iterations=16, precision="fp16", initial_loss_scale=2.0**24), tmp_path)
    lines = [line for line in capfd.readouterr().err.splitlines() if " left | " in line]
    for words in ("gradient norm not finite", r"gradient norm \d", r"loss scale 1\.67772e\+07", r"\d skipped", "lr 3",
                  r" \S+ s/iteration", r"GFLOP/s"):  # fmt: skip
        assert any(re.search(words, line) for line in lines), (words, lines)


def test_a_written_configuration_is_read_as_it_was() -> None:
    for values in ({}, {"precision": "fp16"}, {"precision": "fp16", "initial_loss_scale": 2.0**32}):
        config = parse_config({"name": "x", "model": MODEL, "train": values}, RunConfig, "here")
        written = config.model_dump(mode="json")
        assert RunConfig.model_validate(written) == config
        assert ("initial_loss_scale" in written["train"]) == (values == {"precision": "fp16"})
        assert f'precision = "{config.train.precision}"' in to_toml(config) or not values
