"""Trains many configurations side by side, one to a core, and keeps what came of them."""

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from contextlib import redirect_stderr
from io import StringIO
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch

from engine.config import RunConfig
from engine.run.files import read_validations
from engine.run.resolved import resolve
from engine.step import NotFinite
from engine.train import train
from experiments.forecast.trainings import keep
from experiments.reproduce.files import TRAINING
from experiments.reproduce.processes import StepFailed
from lineage.environment import available_cores
from lineage.errors import UserError
from lineage.processes import end_with_parent
from lineage.progress import QUIET, format_duration


def train_all(configs: Sequence[RunConfig], folder: Path, runs: Path) -> None:
    """Train each configuration below `runs`, one to a core, and keep the outcome in `folder`.

    Trainings that are kept there already are skipped. Raises Interrupted if a training was stopped and StepFailed if it
    failed, after stopping the others.
    """
    waiting = [config for config in configs if not (folder / TRAINING / directory_of(config, runs).name).is_dir()]
    context, total, start = multiprocessing.get_context("fork"), len(waiting), time.monotonic()
    running: dict[Any, tuple[ForkProcess, RunConfig]] = {}
    done = 0
    try:
        while waiting or running:
            while waiting and len(running) < available_cores():
                config = waiting.pop(0)
                process = context.Process(target=_alone, args=(config, runs))
                process.start()
                running[process.sentinel] = process, config
            for sentinel in wait(list(running)):
                process, config = running.pop(sentinel)
                process.join()
                if process.exitcode:
                    raise StepFailed(f"training of {config.name}", process.exitcode)
                place, done = directory_of(config, runs), done + 1
                keep(place, folder)
                loss, passed = read_validations(place)[-1].loss, format_duration(time.monotonic() - start)
                print(f"{place.name}: validation loss {loss:.3f} ({done} of {total}, {passed})", flush=True)
    except BaseException:
        for process, _ in running.values():
            process.terminate()
        for process, _ in running.values():
            process.join()
        raise


def train_one(config: RunConfig, runs: Path, ranks: int = 1) -> None:
    """Train on this many ranks; a loss that is no longer finite ends the training without an error."""
    try:
        train(resolve(config, ranks), runs)
    except NotFinite as error:
        print(f"{config.name} diverged: {error}", flush=True)


def directory_of(config: RunConfig, runs: Path) -> Path:
    """The run directory of a training."""
    return resolve(config, 1).begin(runs).path


def _alone(config: RunConfig, runs: Path) -> None:
    """Train in a forked process, on one thread and without output."""
    end_with_parent(signal.SIGTERM)
    torch.set_num_threads(1)
    os.environ[QUIET] = "1"
    try:
        with redirect_stderr(StringIO()):
            train_one(config, runs)
    except UserError as error:
        print(f"{config.name}: {error}", flush=True)
        raise SystemExit(error.exit_code) from None
