"""The ladder from text to verdict: data, trials of rates, trainings side by side, forecast, the largest rung."""

import shutil
import time
from functools import partial
from pathlib import Path

import torch

from data_pipeline.config import DataConfig
from data_pipeline.files import DataCard
from engine.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from engine.data.dataset import DatasetFacts
from engine.launch.forked import run_forked
from engine.launch.local import launch
from engine.launch.mesh import local_device
from engine.model.microbatch import PipelineInput
from engine.parallel.mesh import serial_mesh
from engine.step import build_step
from evaluation.evaluate import evaluate
from evaluation.settings import Settings
from experiments.ladder.plan import BATCH_SIZE, SHAPES, describe_plan, make_plan, rung_config, rung_model
from experiments.ladder.result import (
    CARD,
    EVALUATIONS,
    LADDER,
    PLAN,
    derive,
    first_of_rungs,
    format_ladder,
    kept_scores,
    make_forecast,
    rate_law,
)
from experiments.ladder.texts import find_tasks
from experiments.reproduce.processes import StepFailed, run_step
from experiments.reproduce.steps import shown
from experiments.trainings.kept import FORECAST, SEARCH_SEED, keep, read_kept, seal_forecast, seeds_of
from experiments.trainings.together import directory_of, train_all, train_one
from lineage.config import load_config
from lineage.environment import available_cores
from lineage.files import read_document, write_document
from lineage.ladder import Forecast, LadderPlan
from lineage.lock import locked
from lineage.progress import announce, format_duration
from lineage.records import RECORDS, write_records
from lineage.run import RunDirectory

TRIED_SECONDS = 1.0
"""For which each shape's speed is measured; the largest are extrapolated from those before."""
TRIED_SHAPES = 7


def climb(budget_seconds: float, recipe: Path, runs: Path, dry_run: bool = False) -> Path | None:
    """Make the ladder that the budget pays for, or go on with it; its sealed directory.

    What is finished is reused. Raises BadInput for a budget or a corpus that is too small, StepFailed where a command
    of the sequence fails, Interrupted after SIGTERM or Ctrl-C.
    """
    start = time.monotonic()
    run_step("mlm-data", "run", shown(recipe), "--runs", str(runs))
    dataset = runs / load_config(recipe, DataConfig).name
    facts = DatasetFacts.read(dataset)
    asked = {"budget_seconds": budget_seconds, "cores": available_cores()}
    if dry_run:
        print(describe_plan(_plan(budget_seconds, dataset, facts)))
        return None
    run = RunDirectory.begin(runs, "ladder", "ladder", asked, facts.parents)
    with locked(run.path):
        if not (run.path / PLAN).is_file():
            write_document(run.path / PLAN, _plan(budget_seconds - (time.monotonic() - start), dataset, facts))
        print(describe_plan(read_document(run.path / PLAN, LadderPlan)), flush=True)
        if run.is_complete:
            run.link()
        else:
            make_ladder(run, dataset, runs)
    run_step("mlm-report", "figure", "ladder", str(run.path), "--out", str(run.path / "report"))
    print(f"{format_ladder(run.path)}\n{run.path}\ndone in {format_duration(time.monotonic() - start)}")
    return run.path


def _plan(seconds: float, dataset: Path, facts: DatasetFacts) -> LadderPlan:
    corpus = read_document(dataset / CARD, DataCard).splits["train"].tokens
    vocabulary = facts.padded_vocab_size
    speeds, is_scored = measured_speeds(vocabulary), bool(find_tasks()[0])
    return make_plan(seconds, available_cores(), speeds, vocabulary, corpus, is_scored)


def measured_speeds(vocabulary: int) -> list[float]:
    """Seconds a trained token of each shape takes on one core while all are at work."""
    cores = available_cores()
    announce(f"about {format_duration(1.5 * TRIED_SECONDS * TRIED_SHAPES)} to measure how fast small models train here")
    of_ranks = run_forked(partial(_tried, vocabulary), cores)
    seconds = [max(each) for each in zip(*of_ranks, strict=True)]
    sizes = [shape.layers * shape.width**2 * 12 + vocabulary * shape.width for shape in SHAPES]
    return seconds + [seconds[-1] * size / sizes[TRIED_SHAPES - 1] for size in sizes[TRIED_SHAPES:]]


def _tried(vocabulary: int) -> list[float]:
    return [_seconds_per_token(rung_model(shape, vocabulary)) for shape in SHAPES[:TRIED_SHAPES]]


def _seconds_per_token(model: ModelConfig) -> float:
    """Of a training step on random tokens."""
    train = TrainConfig(global_batch_size=BATCH_SIZE, microbatch_size=BATCH_SIZE // 2, precision="fp32")
    _, training = build_step(model, train, ParallelConfig(), serial_mesh(local_device()))
    tokens = torch.randint(model.vocab_size, (BATCH_SIZE, model.seq_length + 1))
    inputs = [PipelineInput(part[:, :-1], part[:, 1:], None) for part in tokens.split(train.microbatch_size)]
    training.run(inputs, train.learning_rate)
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < TRIED_SECONDS:
        training.run(inputs, train.learning_rate)
        steps += 1
    return (time.perf_counter() - start) / (steps * BATCH_SIZE * model.seq_length)


def make_ladder(run: RunDirectory, dataset: Path, runs: Path) -> None:
    """Train what the run's plan says below `runs`, forecast the largest rung before it, and seal what came of it."""
    plan = read_document(run.path / PLAN, LadderPlan)
    shutil.copyfile(dataset / CARD, run.path / CARD)
    smaller, largest = range(len(plan.rungs) - 1), len(plan.rungs) - 1
    train_all([_trial(plan, rung, rate, dataset) for rung in reversed(smaller) for rate in plan.rates], run.path, runs)
    rates = rate_law(plan, read_kept(run.path))
    print(rates, flush=True)

    def whole(rung: int, seed: int) -> RunConfig:
        return rung_config(plan, rung, seed, rates.at(plan.rungs[rung].parameters, plan.tokens), dataset)

    train_all([whole(rung, seed) for rung in reversed(smaller) for seed in plan.seeds], run.path, runs)
    if not (run.path / FORECAST).is_file():
        write_document(run.path / FORECAST, make_forecast(plan, read_kept(run.path)))
    forecast = read_document(run.path / FORECAST, Forecast)
    sealed = seal_forecast(run.path / FORECAST, "ladder", forecast.made_of)
    end = forecast.curve[-1]
    foreseen = f"{end.loss:.4f} nats ({end.low:.4f} to {end.high:.4f})"
    print(f"forecast of the largest rung, sealed in {sealed}: {foreseen}", flush=True)
    config = whole(largest, *seeds_of(run.path / FORECAST, 1))
    if code := launch(partial(train_one, config, runs), min(plan.cores, 2)):
        raise StepFailed(f"training of {config.name}", code)
    keep(directory_of(config, runs), run.path)
    _evaluate(run, plan, runs)
    result, records = derive(run.path)
    write_document(run.path / LADDER, result)
    write_records(run.path / RECORDS, records)
    run.complete()


def _trial(plan: LadderPlan, rung: int, rate: float, dataset: Path) -> RunConfig:
    return rung_config(plan, rung, SEARCH_SEED, rate, dataset, plan.search_iterations)


def _evaluate(run: RunDirectory, plan: LadderPlan, runs: Path) -> None:
    """Score the first seed of every rung, and the largest, on the published texts that are here."""
    tasks, missing = find_tasks()
    for name, reason in missing.items():
        print(f"{name}: left out; {reason}")
    for each in first_of_rungs(plan, read_kept(run.path)) if tasks else ():
        out = run.path / EVALUATIONS / f"{each.folder.name}.json"
        if not out.is_file():
            done = evaluate(runs / each.folder.name, tasks, Settings()).done
            write_document(out, kept_scores({name: evaluation.result for name, evaluation in done.items()}))
