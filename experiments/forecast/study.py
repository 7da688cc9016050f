"""The frame of every study: seal a forecast, train with the seeds that it gives, seal what came of it.

Small trainings run side by side, one to a core.
"""

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

from engine.config import RunConfig
from engine.launch.local import launch
from engine.run.files import read_validations
from engine.run.resolved import resolve
from engine.step import NotFinite
from engine.train import train
from experiments.files import FORECAST, TRAINING, EffectForecast, Forecast
from experiments.forecast.trainings import keep, seeds_of
from experiments.reproduce.steps import StepFailed
from lineage.digest import sha256_file
from lineage.environment import available_cores
from lineage.errors import UserError
from lineage.files import read_document, write_document
from lineage.processes import end_with_parent
from lineage.progress import QUIET, format_duration
from lineage.records import RECORDS, Record, write_records
from lineage.run import RunDirectory

F = TypeVar("F", Forecast, EffectForecast)


def try_forecast(
    run: RunDirectory, runs: Path, schema: type[F], make_forecast: Callable[[], F], seeds: int,
    trainings: Callable[[F, list[int]], list[RunConfig]], judge: Callable[[], list[Record]], ranks: int = 1,
) -> None:  # fmt: skip
    """Seal the run's forecast, train below `runs` with so many seeds that it gives, and seal the records of `judge`.

    `make_forecast` trains what the forecast needs; `trainings` returns the configurations that the forecast is about.
    Finished parts are reused. Raises StepFailed if a training fails, Interrupted after SIGTERM or Ctrl-C.
    """
    path = run.path / FORECAST
    if not path.is_file():
        write_document(path, make_forecast())
    forecast = read_document(path, schema)
    print(f"sealed in {_seal(path, run.manifest['kind'], forecast.made_of)}: the forecast of {forecast}", flush=True)
    configs = trainings(forecast, seeds_of(path, seeds))
    if ranks == 1:
        train_all(configs, run.path, runs)
    for config in configs if ranks > 1 else ():
        if code := launch(partial(_train, config, runs, ranks), ranks):
            raise StepFailed(f"training of {config.name}", code)
        keep(_directory_of(config, runs), run.path)
    write_records(run.path / RECORDS, judge())
    run.complete()


def train_all(configs: Sequence[RunConfig], folder: Path, runs: Path) -> None:
    """Train each configuration below `runs`, one to a core, and keep the outcome in `folder`.

    Trainings that are kept there already are skipped. Raises Interrupted if a training was stopped and StepFailed if it
    failed, after stopping the others.
    """
    waiting = [config for config in configs if not (folder / TRAINING / _directory_of(config, runs).name).is_dir()]
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
                place, done = _directory_of(config, runs), done + 1
                keep(place, folder)
                loss, passed = read_validations(place)[-1].loss, format_duration(time.monotonic() - start)
                print(f"{place.name}: validation loss {loss:.3f} ({done} of {total}, {passed})", flush=True)
    except BaseException:
        for process, _ in running.values():
            process.terminate()
        for process, _ in running.values():
            process.join()
        raise


def _seal(forecast: Path, kind: str, made_of: Mapping[str, str]) -> Path:
    """Put a copy of the forecast into a sealed run directory of its own, beside the folder that it lies in."""
    folder = forecast.parent
    config = {kind: folder.name, "sha256": sha256_file(forecast)}
    sealed = RunDirectory.begin(folder.parent, f"{kind}-forecast", "forecast", config, dict(made_of))
    if not sealed.is_complete:
        shutil.copyfile(forecast, sealed.path / FORECAST)
        sealed.complete()
    return sealed.path


def _directory_of(config: RunConfig, runs: Path) -> Path:
    return resolve(config, 1).begin(runs).path


def _train(config: RunConfig, runs: Path, ranks: int) -> None:
    """Train on this many ranks; a loss that is no longer finite ends the training without an error."""
    try:
        train(resolve(config, ranks), runs)
    except NotFinite as error:
        print(f"{config.name} diverged: {error}", flush=True)


def _alone(config: RunConfig, runs: Path) -> None:
    """Train in a forked process, on one thread and without output."""
    end_with_parent(signal.SIGTERM)
    torch.set_num_threads(1)
    os.environ[QUIET] = "1"
    try:
        with redirect_stderr(StringIO()):
            _train(config, runs, ranks=1)
    except UserError as error:
        print(f"{config.name}: {error}", flush=True)
        raise SystemExit(error.exit_code) from None
