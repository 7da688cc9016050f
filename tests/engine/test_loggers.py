"""Each logger's files, read back by the library that wrote them."""

import errno
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlm_repro.engine.config import RecordConfig, RunConfig
from mlm_repro.engine.run.files import Step, read_metrics
from mlm_repro.engine.run.loggers import (
    EVENTS,
    LOGGERS,
    Session,
    open_loggers,
    start_tensorboard,
    writing_metrics,
)
from mlm_repro.engine.run.resolved import read_config
from mlm_repro.engine.trainer import Trainer
from mlm_repro.lineage.config import override_config, parse_config
from mlm_repro.lineage.digest import check_seal
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.run import RunDirectory
from tests.engine.small_run import curve, small_config, train

Numbers = list[tuple[str, int, float]]
"""Name, iteration and value."""


def with_loggers(config: RunConfig, *names: str) -> RunConfig:
    return override_config(config, [f"record.loggers={json.dumps(names)}"])


def numbers_of(run: Path) -> Numbers:
    """What metrics.jsonl says."""
    return [
        (f"{line['kind']}/{name}", line["iteration"], value)
        for line in read_metrics(run)
        for name, value in line.items()
        if name != "iteration" and type(value) in (int, float)
    ]


def read_tensorboard(run: Path) -> Numbers:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert [path.name for path in (run / "tensorboard").iterdir()] == [EVENTS.name]
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return [
        (tag, one.step, one.value)
        for tag in events.Tags()["scalars"]
        for one in events.Scalars(tag)
    ]


READ = {"tensorboard": read_tensorboard}


def crash_in(
    iteration: int, monkeypatch: pytest.MonkeyPatch, config: RunConfig, root: Path
) -> None:
    """Train until that iteration fails as no code expects."""
    iterate = Trainer.iterate

    def fail(trainer: Trainer, number: int) -> Any:
        if number + 1 == iteration:
            raise RuntimeError("planted")
        return iterate(trainer, number)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "iterate", fail)
        with pytest.raises(RuntimeError, match="planted"):
            train(config, root)


def test_every_logger_says_once_what_the_metrics_say_also_after_a_crash(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_loggers(small_config(dataset), *READ)
    crash_in(47, monkeypatch, config, tmp_path)  # the newest checkpoint is of iteration 40
    run = train(config, tmp_path).path
    expected = numbers_of(run)
    assert {iteration for _, iteration, _ in expected} == set(range(61))
    for name, read in READ.items():
        found = read(run)
        assert Counter(place[:2] for place in found) == Counter(place[:2] for place in expected), (
            name
        )
        values = {place[:2]: place[2] for place in found}
        assert values == {place[:2]: pytest.approx(place[2], rel=1e-6) for place in expected}, name
    check_seal(run)
    assert str(EVENTS) in json.loads((run / "COMPLETE").read_text(encoding="utf-8"))["files"]


def test_asking_does_not_make_it_another_run(dataset: Path, copied: Path) -> None:
    assert train(with_loggers(small_config(dataset), "tensorboard"), copied.parent).path == copied


def log_of(run: Path, *names: str) -> tuple[Any, list[str]]:
    """A new log that tells loggers of these names, and where its sentences go."""
    run.mkdir(exist_ok=True)
    sentences: list[str] = []
    return writing_metrics(run, 0, open_loggers(names), sentences.append), sentences


def write_three(log: Any) -> Iterator[int]:
    with log as write:
        for iteration in range(3):
            write(
                Step.model_construct(
                    kind="train", iteration=iteration, loss=0.5, gradient_norm=None, skipped=False
                )
            )
            yield iteration


@pytest.mark.parametrize("name", READ)
def test_a_logger_whose_folder_cannot_be_made_is_named_and_left_out(
    name: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / name).write_text("in the way")
    log, sentences = log_of(run, name)
    assert list(write_three(log)) == [0, 1, 2]
    assert len(read_metrics(run)) == 3
    [sentence] = sentences
    assert sentence.startswith(
        f"{name} gets no more numbers in this session, metrics.jsonl has them all: "
    )
    assert "Not a directory" in sentence


def test_training_outlives_a_disk_that_fills(
    dataset: Path,
    uninterrupted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def start(run: Path) -> Session:
        session = start_tensorboard(run)

        def write(iteration: int, numbers: dict[str, float]) -> None:
            session.write(iteration, numbers)
            if iteration == 5:
                Path("/dev/full").write_bytes(b"more")

        return Session(write, session.close)

    monkeypatch.setitem(LOGGERS, "tensorboard", start)
    run = train(with_loggers(small_config(dataset), "tensorboard"), tmp_path)
    assert run.is_complete
    assert curve(run.path) == curve(uninterrupted)
    warnings = [line for line in capsys.readouterr().err.splitlines() if "no more numbers" in line]
    reason = f"[Errno {errno.ENOSPC}] No space left on device"
    assert warnings == [
        f"tensorboard gets no more numbers in this session, metrics.jsonl has them all: {reason}"
    ]


@pytest.mark.parametrize("name", LOGGERS)
def test_a_missing_library_is_told_before_training(
    name: str, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = [name, *(module for module in sys.modules if module.startswith(f"{name}."))]
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        BadInput, match=rf"needs {name}: pip install 'mlm-repro\[{name}\]'"
    ) as caught:
        train(with_loggers(small_config(dataset), name), tmp_path)
    assert caught.value.exit_code == 2
    assert not list(tmp_path.glob("small-*/metrics.jsonl"))


def test_a_run_that_asked_for_records_of_an_earlier_version_is_read(
    dataset: Path, copied: Path
) -> None:
    manifest = json.loads((copied / "manifest.json").read_text(encoding="utf-8"))
    manifest["config"]["record"] = {
        "loggers": ["wandb", "tensorboard", "mlflow"],
        "noise_scale": True,
    }
    (copied / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert read_config(RunDirectory(copied)).record.loggers == ("tensorboard",)
    assert (
        parse_config({"noise_scale": False, "trust_ratio": False}, RecordConfig, "here")
        == RecordConfig()
    )
    with pytest.raises(BadInput, match="noise_scale"):
        parse_config({"noise_scale": True}, RecordConfig, "here")
    with pytest.raises(BadInput, match=r"record\.loggers"):
        with_loggers(small_config(dataset), "wandb")
