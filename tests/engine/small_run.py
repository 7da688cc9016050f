"""A recipe that trains in a second, and `mlm-train` as a subprocess."""

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.launch.mesh import launched_world_size
from mlm_repro.engine.run.files import read_metrics
from mlm_repro.engine.run.resolved import ResolvedRun, resolve
from mlm_repro.engine.train import train as train_resolved
from mlm_repro.engine.trainer import Trainer
from mlm_repro.lineage.config import parse_config
from mlm_repro.lineage.errors import Interrupted
from mlm_repro.lineage.run import RunDirectory
from tests.commands import Program
from tests.engine import planted

MODEL = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "seq_length": 32}
TRAIN = {
    "iterations": 60,
    "global_batch_size": 8,
    "microbatch_size": 4,
    "learning_rate": 3e-3,
    "min_learning_rate": 1e-4,
    "warmup_iterations": 5,
    "precision": "fp32",
    "validation_interval": 25,
    "validation_samples": 8,
    "checkpoint_interval": 20,
}
LONG = {"iterations": 240, "checkpoint_interval": 80}


def small_config(dataset: Path, model: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    """The recipe, with keys of `train` changed."""
    values = {
        "name": "small",
        "model": MODEL | (model or {}),
        "train": TRAIN | train,
        "data": {"dataset": str(dataset)},
    }
    return parse_config(values, RunConfig, "the test")


def resolved(config: RunConfig) -> ResolvedRun:
    """The run on the ranks of this test."""
    return resolve(config, launched_world_size())


def train(config: RunConfig, root: Path, until: int | None = None) -> RunDirectory:
    """Train a configuration on the ranks of this test."""
    return train_resolved(resolved(config), root, until)


def in_two_sessions(
    config: RunConfig, root: Path, stop_after: int, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Directory of a run asked to stop in iteration `stop_after` and then begun again."""
    iterate = Trainer.iterate

    def iterate_and_stop(trainer: Trainer, iteration: int) -> Any:
        trainer.stop_requested = iteration + 1 == stop_after
        return iterate(trainer, iteration)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "iterate", iterate_and_stop)
        with pytest.raises(Interrupted, match=f"stopped after iteration {stop_after} "):
            train(config, root)
    return train(config, root).path


def write_toml(path: Path, dataset: Path | None, **train: Any) -> Path:
    """The recipe as a configuration file."""
    lines = ['name = "small"', "[model]"]
    lines += [f"{key} = {value}" for key, value in MODEL.items()]
    lines += ["[train]", *[f"{key} = {value!r}" for key, value in (TRAIN | train).items()]]
    if dataset:
        lines += ["[data]", f"dataset = '{dataset}'"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def start(*arguments: object, plant: str = "", **variables: str) -> Program:
    """Start `mlm-train arguments`, with a fault of `tests.engine.planted` if one is named."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    prepare = partial(planted.plant, plant) if plant else None
    return Program("mlm-train", *arguments, environment=clean | variables, prepare=prepare)


def finish(process: Program) -> tuple[int, str, str]:
    """Exit code, standard output and standard error; no command may ever show a traceback."""
    out, err = process.communicate(timeout=300)
    assert "Traceback" not in err, err
    return process.wait(), out, err


def mlm_train(*arguments: object, **options: str) -> tuple[int, str, str]:
    """Run `mlm-train arguments` to its end."""
    return finish(start(*arguments, **options))


def wait_for_iteration(process: Program, run: Path, iteration: int) -> None:
    """Return as soon as the run's metrics have reached `iteration`."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"it ended before iteration {iteration}: {process.communicate()}")
        if (lines := read_metrics(run)) and lines[-1]["iteration"] >= iteration:
            return
        time.sleep(0.005)
    raise AssertionError(f"it did not reach iteration {iteration} in five minutes")


def ranks_of(launcher: int) -> list[int]:
    """Process ids of the launcher's children, from /proc."""
    text = Path(f"/proc/{launcher}/task/{launcher}/children").read_text(encoding="utf-8")
    return [int(number) for number in text.split()]


def curve(run: Path) -> list[tuple[str, int, float]]:
    """Every loss a run wrote."""
    return [(line["kind"], line["iteration"], line["loss"]) for line in read_metrics(run)]


def assert_same_training(run: Path, expected: Path) -> None:
    """Losses, weights and optimizer state of two complete runs are equal bit for bit."""
    assert curve(run) == curve(expected)
    names = [path.name for path in sorted((expected / "checkpoints").iterdir())]
    assert [
        path.name
        for path in sorted((run / "checkpoints").iterdir())
        if not path.name.startswith(".")
    ] == names
    for file in sorted(
        path.name for path in (expected / "checkpoints" / names[-1]).glob("*.safetensors")
    ):
        ours = load_file(run / "checkpoints" / names[-1] / file)
        theirs = load_file(expected / "checkpoints" / names[-1] / file)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert ours[name].equal(tensor), name
