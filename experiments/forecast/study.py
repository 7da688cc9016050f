"""Makes ablations: search the rates, seal a forecast, train with the seeds that it gives, judge.

Small trainings run side by side, one to a core. For each seed all arms start from the same initial
values and see the same tokens in the same order, each at the best of its rates.
"""

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path

import numpy as np
import torch

from mlm_repro.data_pipeline.files import DATASET, DataCard, dataset_digest
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.data.dataset import DatasetFacts
from mlm_repro.engine.launch.local import launch
from mlm_repro.engine.run.files import read_steps, read_validations
from mlm_repro.engine.run.resolved import resolve
from mlm_repro.engine.step import NotFinite
from mlm_repro.engine.train import train
from mlm_repro.experiments.catalogue import ABLATION, Ablation, Experiment, ablation_of
from mlm_repro.experiments.files import FORECAST, SWEEPS, EffectForecast, RateSweep, read_runs
from mlm_repro.experiments.forecast.ablation import (
    ablation_config,
    derive_effects,
    searched_rates,
    slug,
    sweep_config,
    trials_of,
)
from mlm_repro.experiments.forecast.trainings import Kept, keep, seeds_of
from mlm_repro.experiments.reproduce.steps import StepFailed
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.digest import sha256_file
from mlm_repro.lineage.environment import available_cores
from mlm_repro.lineage.errors import BadInput, Interrupted, UserError
from mlm_repro.lineage.files import read_document, write_document
from mlm_repro.lineage.lock import locked
from mlm_repro.lineage.processes import end_with_parent, hear_stops, held_back
from mlm_repro.lineage.progress import QUIET, announce, format_duration
from mlm_repro.lineage.records import RECORDS, write_records
from mlm_repro.lineage.run import RunDirectory


def run_ablation(experiment: Experiment, datasets: Sequence[Path], runs: Path) -> RunDirectory:
    """Search each arm's rate, seal the forecast, train every arm with every seed that the forecast
    gives, and seal the outcome; return the ablation's RunDirectory.

    Everything lies below the folder `runs`; finished parts are reused. `datasets` are directories,
    one for each index that an arm has. A complete ablation is returned at once. Raises BadInput for
    an experiment without an ablation, for too few, too many or unequal datasets, and if another
    process is at work on the ablation, IntegrityFailure for a dataset that is missing or damaged,
    for a kept forecast or training that was damaged or changed, and if no rate of a learning-rate
    finder lowered the loss, StepFailed if a training fails, Interrupted after SIGTERM or Ctrl-C.
    """
    ablation = ablation_of(experiment)
    name = experiment.name
    needed = 1 + max(arm.dataset for arm in ablation.arms)
    if len(datasets) != needed:
        raise BadInput(f"{name} takes --dataset {needed} times; it was given {len(datasets)}")
    bits_per_nat = _bits_per_nat(datasets)
    digests = [dataset_digest(path) for path in datasets]
    values = ablation.model_dump(mode="json")
    facts: JSON = {"experiment": {"name": name}, "mode": "scaled"}
    settings = facts | {ABLATION: ablation.model_dump(mode="json", exclude_defaults=True)}
    parents = {f"dataset-{index}": digest for index, digest in enumerate(digests)}
    run = RunDirectory.begin(
        runs,
        f"experiment-{slug(name)}-effects",
        ABLATION,
        facts | {ABLATION: values},
        parents,
        settings=settings,
    )
    if run.is_complete:
        run.link()
        return run
    trials = []
    for arm in ablation.arms:
        trials += trials_of(name, ablation, arm, datasets[arm.dataset])
    trainings = len(ablation.arms) * ablation.seeds
    announce(
        f"{len(trials)} trials of rates and {trainings} trainings, {available_cores()} at a time"
    )

    with locked(run.path):
        if not (run.path / FORECAST).is_file():
            train_all(trials, run.path, runs)
            _sweep_rates(name, ablation, datasets, run.path, runs)
            rates, searched = searched_rates(name, ablation, Kept(run.path), digests)
            forecast = EffectForecast(
                experiment=name,
                ablation=values,
                datasets=digests,
                bits_per_nat=bits_per_nat,
                bigram_nats=[bigram_loss(path) for path in datasets],
                rates=rates,
                searched={each.name: each.digest for each in searched},
            )
            write_document(run.path / FORECAST, forecast)
        forecast = _seal_forecast(run)
        configs = []
        for seed in seeds_of(run.path / FORECAST, ablation.seeds):
            configs += [
                ablation_config(
                    name, ablation, arm, seed, forecast.rates[arm.name], datasets[arm.dataset]
                )
                for arm in ablation.arms
            ]
        train_all(configs, run.path, runs)
        write_records(run.path / RECORDS, derive_effects(run.path)[1])
        run.complete()
    return run


def _sweep_rates(
    experiment: str, ablation: Ablation, datasets: Sequence[Path], folder: Path, runs: Path
) -> None:
    """Run the learning-rate finder's training for each arm whose rate the finder gives, below the
    folder `runs`, and write the rates and losses of its iterations, without skipped ones, to
    sweeps/ARM.json in `folder`, the ablation's. Do nothing if the ablation has no finder. Raises
    StepFailed if a training fails."""
    for arm in ablation.arms:
        if not ablation.finder or arm.rate_of:
            continue
        config = sweep_config(experiment, ablation, arm, datasets[arm.dataset])
        if code := launch(partial(_train, config, runs), 1):
            raise StepFailed(command=f"training of {config.name}", status=code)
        steps = [step for step in read_steps(_directory_of(config, runs)) if not step.skipped]
        sweep = RateSweep(
            rates=[step.learning_rate for step in steps], losses=[step.loss for step in steps]
        )
        (folder / SWEEPS).mkdir(exist_ok=True)
        write_document(folder / SWEEPS / f"{slug(arm.name)}.json", sweep)


def _seal_forecast(run: RunDirectory) -> EffectForecast:
    """Seal a copy of forecast.json, which must be in the directory of `run`, an ablation's
    RunDirectory, as a run of its own beside that directory, unless this was done before.
    Print the sealed run's path and the forecast's rates, and return the EffectForecast. Raises
    IntegrityFailure if the forecast cannot be read, and the errors of `RunDirectory.begin`, such as
    BadInput if the sealed run's directory holds other work."""
    path = run.path / FORECAST
    forecast = read_document(path, EffectForecast)
    facts = {ABLATION: run.path.name, "sha256": sha256_file(path)}
    sealed = RunDirectory.begin(
        run.path.parent, f"{ABLATION}-forecast", "forecast", facts, forecast.made_of
    )
    if not sealed.is_complete:
        shutil.copyfile(path, sealed.path / FORECAST)
        sealed.complete()
    print(
        f"sealed in {sealed.path}: the forecast of the claimed effects, with the rates"
        f" {forecast.rates}",
        flush=True,
    )
    return forecast


def train_all(configs: Sequence[RunConfig], folder: Path, runs: Path) -> None:
    """Train each configuration below the folder `runs`, one to a core, wait for all, print a line
    for each, and keep the outcomes in runs.jsonl of the ablation's folder, `folder`. A training
    that diverges is an outcome, not an error.

    Trainings that are kept there already are skipped. Raises Interrupted if a training was stopped
    or killed and StepFailed if one failed, after stopping the others.
    """
    done_before = read_runs(folder)
    start = time.monotonic()
    waiting = [config for config in configs if _directory_of(config, runs).name not in done_before]
    pool = ProcessPoolExecutor(available_cores(), multiprocessing.get_context("fork"), _begin_alone)
    try:
        with held_back():  # until a process of the pool has its handlers
            trainings = {pool.submit(_alone, config, runs): config for config in waiting}
        for done, training in enumerate(as_completed(trainings), 1):
            config = trainings[training]
            if code := training.result():
                raise StepFailed(command=f"training of {config.name}", status=code)
            directory = _directory_of(config, runs)
            keep(directory, folder)
            loss = read_validations(directory)[-1].loss
            print(
                f"{directory.name}: validation loss {loss:.3f}"
                f" ({done} of {len(waiting)}, {format_duration(time.monotonic() - start)})",
                flush=True,
            )
    except BaseException as error:
        for process in multiprocessing.active_children():
            process.terminate()
        if isinstance(error, BrokenProcessPool):
            raise Interrupted(
                "a training was stopped or killed; the same command continues from there"
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _bits_per_nat(datasets: Sequence[Path]) -> list[float]:
    """Return a list with, for each dataset's directory, the bits per byte that one nat per token of
    its validation text amounts to; 0 if it has no split `valid`.

    Raises BadInput unless all datasets have splits of the same names with as many documents and
    bytes: datasets of the same text do. Raises IntegrityFailure if a dataset.json cannot be read.
    """
    cards = [read_document(path / DATASET, DataCard) for path in datasets]
    texts = {
        tuple((name, split.documents, split.bytes) for name, split in card.splits.items())
        for card in cards
    }
    if len(texts) > 1:
        raise BadInput(
            f"{' and '.join(map(str, datasets))} do not hold the same text: the splits in their"
            " dataset.json have other names, or other numbers of documents or bytes; give datasets"
            " that were built of one text, with the same splits"
        )
    return [card.splits["valid"].bits_per_nat if "valid" in card.splits else 0.0 for card in cards]


def bigram_loss(dataset: Path) -> float:
    """Return the loss, in nats per token of the validation text of the dataset in a directory, of
    bigrams counted in its training text, smoothed as Witten and Bell do. Of each split only the
    first file of tokens is read. Raises DataMissing if the dataset is missing or not split,
    BadInput if it lacks a token file, IntegrityFailure if it is incomplete or damaged.

    p(b | a) = (c(a, b) + k(a) · p(b)) / (c(a) + k(a)), where k(a) different tokens follow a (1 if
    none does), and p(b) is the share of b with one more of every token.
    """
    facts = DatasetFacts.read(dataset)
    train, valid = (
        facts.token_files(split)[0][0].tokens.astype(np.int64) for split in ("train", "valid")
    )
    size = facts.padded_vocab_size
    share = (np.bincount(train, minlength=size) + 1) / (len(train) + size)
    pairs, counts = np.unique(train[:-1] * size + train[1:], return_counts=True)
    before = np.bincount(train[:-1], minlength=size)
    kinds = np.bincount(pairs // size, minlength=size)
    first = valid[:-1]
    second = valid[1:]
    asked = first * size + second
    index = np.minimum(np.searchsorted(pairs, asked), len(pairs) - 1)
    seen = np.where(pairs[index] == asked, counts[index], 0)
    follows = np.maximum(kinds, 1)[first]
    return float(-np.log((seen + follows * share[second]) / (before[first] + follows)).mean())


def _directory_of(config: RunConfig, runs: Path) -> Path:
    return resolve(config, 1).begin(runs).path


def _train(config: RunConfig, runs: Path) -> None:
    """Train the model of `config` on one rank, in its run directory below the folder `runs`, from
    the newest checkpoint there. A loss or gradient that is not finite, or a training without an
    update, ends with a printed message and without an error; other errors are raised."""
    try:
        train(resolve(config, 1), runs)
    except NotFinite as error:
        print(f"{config.name} diverged: {error}", flush=True)


def _begin_alone() -> None:
    """Set up this process, which was forked for trainings: torch uses one thread, quiet mode is on,
    stop signals are no longer blocked, and on Linux SIGTERM comes when the parent process ends."""
    end_with_parent(signal.SIGTERM)
    torch.set_num_threads(1)
    os.environ[QUIET] = "1"
    hear_stops()


def _alone(config: RunConfig, runs: Path) -> int:
    """Train the model of `config` below the folder `runs` with standard error discarded and return
    the exit code, 0 also if the loss diverged; the message of a UserError is printed. A training
    that is stopped ends its process, so that no other training begins in it."""
    try:
        with redirect_stderr(StringIO()):
            _train(config, runs)
    except Interrupted as stopped:
        os._exit(stopped.exit_code)
    except UserError as error:
        print(f"{config.name}: {error}", flush=True)
        return error.exit_code
    return 0
