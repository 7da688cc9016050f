"""Each logger's files, read back by the library that wrote them."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.run.files import Step, read_metrics
from mlm_repro.engine.run.loggers import EVENTS, LOGGERS, Session, open_loggers, start_tensorboard, writing_metrics
from mlm_repro.engine.trainer import Trainer
from mlm_repro.lineage.config import override_config
from mlm_repro.lineage.digest import check_seal
from mlm_repro.lineage.errors import BadInput
from tests.engine.small_run import curve, ranks_of, small_config, train

Numbers = list[tuple[str, int, float]]
"""Name, iteration and value."""


@pytest.fixture(autouse=True)
def _nobody_elses_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_MODE", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))


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
    return [(tag, one.step, one.value) for tag in events.Tags()["scalars"] for one in events.Scalars(tag)]


def read_wandb(run: Path) -> Numbers:
    """As `wandb leet inspect` prints the one run there is; W&B adds a name to a step's numbers that begins with `_`."""
    [file] = (run / "wandb").glob("offline-run-*/run-*.wandb")
    wandb = Path(sys.executable).with_name("wandb")
    done = subprocess.run(
        [wandb, "leet", "inspect", "--json", file], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    records = [json.loads(line) for line in done.stdout.splitlines()]
    [described] = [record["run"] for record in records if record["type"] == "run"]
    assert (described["project"], described["display_name"]) == ("mlm-repro", run.name)
    assert described["config"]["update"]["model"]["hidden_size"] == 32
    assert [record["exit"]["exit_code"] for record in records if record["type"] == "exit"] == [0]
    history = [record["history"]["item"] for record in records if record["type"] == "history"]
    return [
        (name, item["_step"], value) for item in history for name, value in item.items() if not name.startswith("_")
    ]


def read_mlflow(run: Path) -> Numbers:
    from mlflow import MlflowClient

    client = MlflowClient((run / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("mlm-repro")
    assert experiment
    [found] = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == (run.name, "FINISHED")
    assert found.data.params["model.hidden_size"] == "32"
    histories = [client.get_metric_history(found.info.run_id, name) for name in found.data.metrics]
    return [(one.key, one.step, one.value) for history in histories for one in history]


READ = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow}


def crash_in(iteration: int, monkeypatch: pytest.MonkeyPatch, config: RunConfig, root: Path) -> None:
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
        assert Counter(place[:2] for place in found) == Counter(place[:2] for place in expected), name
        values = {place[:2]: place[2] for place in found}
        assert values == {place[:2]: pytest.approx(place[2], rel=1e-6) for place in expected}, name
    assert services() == []
    check_seal(run)
    (run / "wandb" / "synced").touch()  # as uploading does
    check_seal(run)
    assert str(EVENTS) in json.loads((run / "COMPLETE").read_text(encoding="utf-8"))["files"]


def services() -> list[int]:
    """Process ids of W&B's services that this process started."""
    return [pid for pid in ranks_of(os.getpid()) if "wandb-core" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_asking_does_not_make_it_another_run(dataset: Path, copied: Path) -> None:
    assert train(with_loggers(small_config(dataset), "tensorboard"), copied.parent).path == copied


def log_of(run: Path, *names: str) -> tuple[Any, list[str]]:
    """A new log that tells loggers of these names, and where its sentences go."""
    run.mkdir(exist_ok=True)
    sentences: list[str] = []
    return writing_metrics(run, 0, {"model": {"hidden_size": 32}}, open_loggers(names), sentences.append), sentences


def write_three(log: Any) -> Iterator[int]:
    with log as write:
        for iteration in range(3):
            write(Step.model_construct(kind="train", iteration=iteration, loss=0.5, gradient_norm=None, skipped=False))
            yield iteration


@pytest.mark.parametrize("name", READ)
def test_a_logger_whose_folder_cannot_be_made_is_named_and_left_out(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / name).write_text("in the way")
    log, sentences = log_of(run, name, "tensorboard")
    assert list(write_three(log)) == [0, 1, 2]
    assert len(read_metrics(run)) == 3
    [sentence] = sentences
    assert sentence.startswith(f"{name} gets no more numbers in this session, metrics.jsonl has them all: ")
    assert "Not a directory" in sentence
    if name != "tensorboard":
        assert [one[1] for one in read_tensorboard(run)] == [0, 1, 2]  # the others go on
    assert services() == []


def test_a_service_that_is_lost_ends_its_logger_alone(tmp_path: Path) -> None:
    log, sentences = log_of(tmp_path / "run", "wandb", "mlflow")
    for iteration in write_three(log):
        if iteration == 0:
            [service] = services()
            os.kill(service, signal.SIGKILL)
    assert len(read_metrics(tmp_path / "run")) == 3
    assert [sentence.partition(" ")[0] for sentence in sentences] == ["wandb"]
    assert read_mlflow(tmp_path / "run") == [("train/loss", iteration, 0.5) for iteration in range(3)]
    again, sentences = log_of(tmp_path / "run", "wandb")  # the next session of the same process
    assert (list(write_three(again)), sentences) == ([0, 1, 2], [])
    assert read_wandb(tmp_path / "run") == [("train/loss", iteration, 0.5) for iteration in range(3)]


def test_on_a_server_each_session_is_a_run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "server").as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "ours")
    for _ in range(2):
        log, sentences = log_of(tmp_path / "run", "mlflow")
        assert (list(write_three(log)), sentences) == ([0, 1, 2], [])
    assert not (tmp_path / "run" / "mlflow").exists()
    client = MlflowClient()
    runs = client.search_runs([one.experiment_id for one in client.search_experiments() if one.name == "ours"])
    assert [run.info.run_name for run in runs] == ["run", "run"]
    for run in runs:
        assert [one.step for one in client.get_metric_history(run.info.run_id, "train/loss")] == [0, 1, 2]


def test_training_outlives_a_disk_that_fills(
    dataset: Path, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def start(run: Path, config: dict[str, Any]) -> Session:
        session = start_tensorboard(run, config)

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
    assert warnings == [f"tensorboard gets no more numbers in this session, metrics.jsonl has them all: {reason}"]


@pytest.mark.parametrize("name", LOGGERS)
def test_a_missing_library_is_told_before_training(
    name: str, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = [name, *(module for module in sys.modules if module.startswith(f"{name}."))]
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BadInput, match=rf"needs {name}: pip install 'mlm-repro\[{name}\]'") as caught:
        train(with_loggers(small_config(dataset), name), tmp_path)
    assert caught.value.exit_code == 2
    assert not list(tmp_path.glob("small-*/metrics.jsonl"))
