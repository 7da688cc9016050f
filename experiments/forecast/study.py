"""Makes ladders and ablations: seal a forecast, train with the seeds that it gives, judge.

Small trainings run side by side, one to a core. In an ablation, for each seed, all arms start from
the same initial values and see the same tokens in the same order, each at the best of its rates.
"""

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from mlm_repro.data_pipeline.config import DataConfig
from mlm_repro.data_pipeline.files import DATASET, DataCard, dataset_digest
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.data.dataset import DatasetFacts
from mlm_repro.engine.launch.local import launch
from mlm_repro.engine.run.files import read_steps, read_validations
from mlm_repro.engine.run.resolved import resolve
from mlm_repro.engine.step import NotFinite
from mlm_repro.engine.train import train
from mlm_repro.evaluation.evaluate import evaluate
from mlm_repro.evaluation.models.places import Place
from mlm_repro.evaluation.schema import PerplexityResult
from mlm_repro.evaluation.settings import Settings
from mlm_repro.evaluation.tasks.names import build_task
from mlm_repro.experiments.catalogue import ABLATION, Experiment, ablation_of
from mlm_repro.experiments.files import (
    EVALUATIONS,
    FORECAST,
    LADDER,
    PLAN,
    SWEEPS,
    EffectForecast,
    Forecast,
    LadderPlan,
    LadderResult,
    LadderScores,
    RateSweep,
    read_runs,
)
from mlm_repro.experiments.forecast.ablation import (
    ablation_config,
    derive_effects,
    searched_rates,
    slug,
    sweep_config,
    trials_of,
)
from mlm_repro.experiments.forecast.ladder import (
    KeptRungs,
    derive,
    describe_plan,
    first_of_rungs,
    make_forecast,
    make_plan,
    read_scores,
    trial_configs,
    whole_configs,
)
from mlm_repro.experiments.forecast.trainings import Kept, keep, seeds_of
from mlm_repro.experiments.reproduce.steps import StepFailed, run_step, shown
from mlm_repro.experiments.scores import text_score
from mlm_repro.lineage.config import load_config
from mlm_repro.lineage.digest import sha256_file
from mlm_repro.lineage.environment import available_cores
from mlm_repro.lineage.errors import BadInput, DataMissing, Interrupted, UserError
from mlm_repro.lineage.files import read_document, write_document, write_lines
from mlm_repro.lineage.lock import locked
from mlm_repro.lineage.processes import end_with_parent, hear_stops, held_back
from mlm_repro.lineage.progress import QUIET, announce, format_duration
from mlm_repro.lineage.records import RECORDS, Record, write_records
from mlm_repro.lineage.run import RunDirectory

F = TypeVar("F", Forecast, EffectForecast)
TEXT = "wikitext103"
"""Protocol by which the models of a ladder are compared on a published text."""


def climb(rungs: int, recipe: Path, runs: Path, dry_run: bool = False) -> None:
    """Make or continue the ladder of so many rungs. Finished parts are reused.

    Raises BadInput for a corpus that is too small, StepFailed if a command of the sequence fails,
    Interrupted after SIGTERM or Ctrl-C.
    """
    start = time.monotonic()
    run_step("mlm-data", "run", shown(recipe), "--runs", str(runs))
    dataset = runs / load_config(recipe, DataConfig).name
    facts = DatasetFacts.read(dataset)
    corpus = read_document(dataset / DATASET, DataCard).splits["train"].tokens
    plan = make_plan(rungs, available_cores(), facts.padded_vocab_size, corpus)
    print(describe_plan(plan), flush=True)
    if dry_run:
        return
    run = RunDirectory.begin(
        runs, "ladder", "ladder", {"rungs": rungs, "cores": plan.cores}, facts.parents
    )
    with locked(run.path):
        if run.is_complete:
            run.link()
        else:
            write_document(run.path / PLAN, plan)
            make_ladder(run, dataset, runs)
    run_step("mlm-report", "figure", "ladder", str(run.path), "--out", str(run.path / "report"))
    result = read_document(run.path / LADDER, LadderResult)
    print(
        result.rates,
        result.sentence,
        run.path,
        f"done in {format_duration(time.monotonic() - start)}",
        sep="\n",
    )


def make_ladder(run: RunDirectory, dataset: Path, runs: Path) -> None:
    """Train the run's plan below `runs`, forecast the largest rung before its training, and seal
    the outcome."""
    plan = read_document(run.path / PLAN, LadderPlan)
    shutil.copyfile(dataset / DATASET, run.path / DATASET)
    *smaller, largest = range(len(plan.rungs))

    def train_smaller() -> Forecast:
        trials = reversed(trial_configs(plan, dataset).values())
        train_all([config for configs in trials for config in configs], run.path, runs)
        rates = KeptRungs(run.path).rates
        print(rates, flush=True)
        wholes = (
            whole_configs(plan, rates, rung, plan.seeds, dataset) for rung in reversed(smaller)
        )
        train_all([config for configs in wholes for config in configs], run.path, runs)
        return make_forecast(plan, KeptRungs(run.path).smaller())

    def foreseen(_: Forecast, seeds: list[int]) -> list[RunConfig]:
        return whole_configs(plan, KeptRungs(run.path).rates, largest, seeds, dataset)

    def judge() -> list[Record]:
        scores = read_scores(run.path)
        for each in first_of_rungs(KeptRungs(run.path).all()):
            if each.name not in scores:
                try:
                    done = evaluate(
                        Place.find(runs / each.name), {TEXT: partial(build_task, TEXT)}, Settings()
                    ).done
                except DataMissing as error:
                    print(f"not scored: {error}")
                    break
                scored = done[TEXT].result
                assert isinstance(scored, PerplexityResult)
                text = scored.task.removesuffix("-perplexity")
                scores[each.name] = LadderScores(name=each.name, texts={text: text_score(scored)})
                write_lines(run.path / EVALUATIONS, scores.values())
        result, records = derive(run.path)
        write_document(run.path / LADDER, result)
        return records

    try_forecast(run, runs, Forecast, train_smaller, 1, foreseen, judge, ranks=min(plan.cores, 2))


def run_ablation(experiment: Experiment, datasets: Sequence[Path], runs: Path) -> RunDirectory:
    """Search each arm's rate, seal the forecast, train every arm with every seed that it gives, and
    seal the outcome.

    Everything lies below `runs`; finished parts are reused. Raises BadInput for an experiment
    without an ablation, and for too few, too many or unequal datasets, StepFailed if a training
    fails, Interrupted after SIGTERM or Ctrl-C.
    """
    ablation, name = ablation_of(experiment), experiment.name
    needed = 1 + max(arm.dataset for arm in ablation.arms)
    if len(datasets) != needed:
        raise BadInput(f"{name} takes --dataset {needed} times; it was given {len(datasets)}")
    bits_per_nat, digests = _bits_per_nat(datasets), [dataset_digest(path) for path in datasets]
    facts: dict[str, Any] = {"experiment": {"name": name}, "mode": "scaled"}
    about = facts | {ABLATION: ablation.model_dump(mode="json")}
    settings = facts | {ABLATION: ablation.model_dump(mode="json", exclude_defaults=True)}
    parents = {f"dataset-{index}": digest for index, digest in enumerate(digests)}
    run = RunDirectory.begin(
        runs, f"experiment-{slug(name)}-effects", ABLATION, about, parents, settings=settings
    )
    if run.is_complete:
        run.link()
        return run
    trials = [
        each
        for arm in ablation.arms
        for each in trials_of(name, ablation, arm, datasets[arm.dataset])
    ]
    trainings = len(ablation.arms) * ablation.seeds
    announce(
        f"{len(trials)} trials of rates and {trainings} trainings, {available_cores()} at a time"
    )

    def search() -> EffectForecast:
        train_all(trials, run.path, runs)
        for arm in (each for each in ablation.arms if ablation.finder and not each.rate_of):
            index = _train_on(sweep_config(name, ablation, arm, datasets[arm.dataset]), runs, 1)
            steps = [step for step in read_steps(index) if not step.skipped]
            sweep = RateSweep(
                rates=[step.learning_rate for step in steps], losses=[step.loss for step in steps]
            )
            (run.path / SWEEPS).mkdir(exist_ok=True)
            write_document(run.path / SWEEPS / f"{slug(arm.name)}.json", sweep)
        rates, searched = searched_rates(name, ablation, Kept(run.path), digests)
        return EffectForecast(
            experiment=name,
            ablation=ablation.model_dump(mode="json"),
            datasets=digests,
            bits_per_nat=bits_per_nat,
            bigram_nats=[bigram_loss(path) for path in datasets],
            rates=rates,
            searched={each.name: each.digest for each in searched},
        )

    def arms(forecast: EffectForecast, seeds: list[int]) -> list[RunConfig]:
        return [
            ablation_config(
                name, ablation, arm, seed, forecast.rates[arm.name], datasets[arm.dataset]
            )
            for seed in seeds
            for arm in ablation.arms
        ]

    with locked(run.path):
        try_forecast(
            run,
            runs,
            EffectForecast,
            search,
            ablation.seeds,
            arms,
            lambda: derive_effects(run.path)[1],
        )
    return run


def try_forecast(
    run: RunDirectory,
    runs: Path,
    schema: type[F],
    make_forecast: Callable[[], F],
    seeds: int,
    trainings: Callable[[F, list[int]], list[RunConfig]],
    judge: Callable[[], list[Record]],
    ranks: int = 1,
) -> None:
    """Seal the run's forecast, train below `runs` with the first `seeds` seeds that it gives, and
    seal the records of `judge`.

    `make_forecast` makes the trainings that the forecast needs and returns it; `trainings` returns
    the configurations that the forecast is about. Finished parts are reused. Raises StepFailed if a
    training fails, Interrupted after SIGTERM or Ctrl-C.
    """
    path = run.path / FORECAST
    if not path.is_file():
        write_document(path, make_forecast())
    forecast = read_document(path, schema)
    kind, facts = (
        run.manifest["kind"],
        {run.manifest["kind"]: run.path.name, "sha256": sha256_file(path)},
    )
    sealed = RunDirectory.begin(
        run.path.parent, f"{kind}-forecast", "forecast", facts, dict(forecast.made_of)
    )
    if not sealed.is_complete:
        shutil.copyfile(path, sealed.path / FORECAST)
        sealed.complete()
    print(f"sealed in {sealed.path}: the forecast of {forecast}", flush=True)
    configs = trainings(forecast, seeds_of(path, seeds))
    if ranks == 1:
        train_all(configs, run.path, runs)
    for config in configs if ranks > 1 else ():
        keep(_train_on(config, runs, ranks), run.path)
    write_records(run.path / RECORDS, judge())
    run.complete()


def train_all(configs: Sequence[RunConfig], folder: Path, runs: Path) -> None:
    """Train each configuration below `runs`, one to a core, and keep the outcomes in `folder`.

    Trainings that are kept there already are skipped. Raises Interrupted if a training was stopped
    or killed and StepFailed if one failed, after stopping the others.
    """
    done_before, start = read_runs(folder), time.monotonic()
    waiting = [config for config in configs if _directory_of(config, runs).name not in done_before]
    pool = ProcessPoolExecutor(available_cores(), multiprocessing.get_context("fork"), _begin_alone)
    try:
        with held_back():  # until a process of the pool has its handlers
            trainings = {pool.submit(_alone, config, runs): config for config in waiting}
        for done, training in enumerate(as_completed(trainings), 1):
            config = trainings[training]
            if code := training.result():
                raise StepFailed(f"training of {config.name}", code)
            directory = _directory_of(config, runs)
            keep(directory, folder)
            loss, passed = (
                read_validations(directory)[-1].loss,
                format_duration(time.monotonic() - start),
            )
            print(
                f"{directory.name}: validation loss {loss:.3f}"
                f" ({done} of {len(waiting)}, {passed})",
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
    """Return the bits per byte for each nat per token, for each dataset's validation text; 0 if its
    card does not state it.

    Raises BadInput unless all datasets have the same text.
    """
    cards = [read_document(path / DATASET, DataCard) for path in datasets]
    texts = {
        tuple((name, split.documents, split.bytes) for name, split in card.splits.items())
        for card in cards
    }
    if len(texts) > 1:
        raise BadInput(f"{' and '.join(map(str, datasets))} do not hold the same text")
    return [card.splits["valid"].bits_per_nat if "valid" in card.splits else 0.0 for card in cards]


def bigram_loss(dataset: Path) -> float:
    """Return the validation text's loss in nats per token by bigrams counted in the training text,
    smoothed as Witten and Bell do.

    p(b | a) = (c(a, b) + k(a) · p(b)) / (c(a) + k(a)), where k(a) different tokens follow a, and
    p(b) is the share of b with one more of every token.
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
    first, second = valid[:-1], valid[1:]
    asked = first * size + second
    index = np.minimum(np.searchsorted(pairs, asked), len(pairs) - 1)
    seen = np.where(pairs[index] == asked, counts[index], 0)
    follows = np.maximum(kinds, 1)[first]
    return float(-np.log((seen + follows * share[second]) / (before[first] + follows)).mean())


def _directory_of(config: RunConfig, runs: Path) -> Path:
    return resolve(config, 1).begin(runs).path


def _train_on(config: RunConfig, runs: Path, ranks: int) -> Path:
    """Train in processes of this many ranks and return the training's directory. Raises StepFailed
    if it failed."""
    if code := launch(partial(_train, config, runs, ranks), ranks):
        raise StepFailed(f"training of {config.name}", code)
    return _directory_of(config, runs)


def _train(config: RunConfig, runs: Path, ranks: int) -> None:
    """Train on this many ranks. A loss that is not finite ends the training with a message and
    without an error."""
    try:
        train(resolve(config, ranks), runs)
    except NotFinite as error:
        print(f"{config.name} diverged: {error}", flush=True)


def _begin_alone() -> None:
    """Prepare a forked process for trainings on one thread, without output, that ends with its
    parent."""
    end_with_parent(signal.SIGTERM)
    torch.set_num_threads(1)
    os.environ[QUIET] = "1"
    hear_stops()


def _alone(config: RunConfig, runs: Path) -> int:
    """Train without output and return the exit code. A training that is stopped ends its process,
    so that no other training begins in it."""
    try:
        with redirect_stderr(StringIO()):
            _train(config, runs, ranks=1)
    except Interrupted as stopped:
        os._exit(stopped.exit_code)
    except UserError as error:
        print(f"{config.name}: {error}", flush=True)
        return error.exit_code
    return 0
