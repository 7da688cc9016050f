"""Makes a ladder: data, trials of rates, trainings side by side, forecast, the largest rung, verdict.

Finished models are scored on published texts in windows that overlap by half: WikiText-103's two files with
Megatron-LM's detokenizer, OpenAI's LAMBADA as plain text, and its last words by the strict rule.
"""

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from data_pipeline.config import DataConfig
from data_pipeline.contamination.testsets import TEST_SETS, find_test_set
from data_pipeline.files import DATASET, DataCard
from engine.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from engine.data.dataset import DatasetFacts
from engine.launch.forked import run_forked
from engine.launch.local import launch
from engine.launch.mesh import local_device
from engine.model.microbatch import PipelineInput
from engine.parallel.mesh import serial_mesh
from engine.step import build_step
from evaluation.documents import RunningText
from evaluation.evaluate import evaluate
from evaluation.lambada import openai_lambada, openai_passages
from evaluation.perplexity import UNCHANGED, PerplexityTask, sliding_stream
from evaluation.protocol import SourceText, Task
from evaluation.settings import Settings
from evaluation.wikitext103 import MEGATRON, read_wikitext
from experiments.files import FORECAST, LADDER, PLAN, Forecast, LadderPlan
from experiments.forecast.ladder import derive, first_of_rungs, format_ladder, kept_scores, make_forecast, rate_law
from experiments.forecast.ladder_plan import BATCH_SIZE, SHAPES, describe_plan, make_plan, rung_config, rung_model
from experiments.forecast.together import directory_of, train_all, train_one
from experiments.forecast.trainings import SEARCH_SEED, keep, read_kept, seal_forecast, seeds_of
from experiments.reproduce.files import EVALUATIONS
from experiments.reproduce.processes import StepFailed, run_step
from experiments.reproduce.steps import shown
from lineage.config import load_config
from lineage.environment import available_cores
from lineage.errors import DataMissing
from lineage.files import read_document, write_document
from lineage.lock import locked
from lineage.progress import announce, format_duration
from lineage.records import RECORDS, write_records
from lineage.run import RunDirectory

if TYPE_CHECKING:
    from evaluation.checkpoints import EvaluatedCheckpoint
    from evaluation.evaluate import MakeTask

TRIED_SECONDS = 1.0
"""Time in which each shape's speed is measured."""
TRIED_SHAPES = 7
"""Shapes that are measured; the speeds of larger ones are extrapolated."""


def climb(budget_seconds: float, recipe: Path, runs: Path, dry_run: bool = False) -> Path | None:
    """Make or continue the ladder that the budget pays for; its sealed directory.

    Finished parts are reused. Raises BadInput for a budget or a corpus that is too small, StepFailed if a command of
    the sequence fails, Interrupted after SIGTERM or Ctrl-C.
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


def make_ladder(run: RunDirectory, dataset: Path, runs: Path) -> None:
    """Train the run's plan below `runs`, forecast the largest rung before its training, and seal the outcome."""
    plan = read_document(run.path / PLAN, LadderPlan)
    shutil.copyfile(dataset / DATASET, run.path / DATASET)
    *smaller, largest = range(len(plan.rungs))
    trials = [
        rung_config(plan, rung, SEARCH_SEED, rate, dataset, plan.search_iterations)
        for rung in reversed(smaller)
        for rate in plan.rates
    ]
    train_all(trials, run.path, runs)
    rates = rate_law(plan, read_kept(run.path))
    print(rates, flush=True)

    def whole(rung: int, seed: int) -> RunConfig:
        return rung_config(plan, rung, seed, rates.at(plan.rungs[rung].parameters, plan.tokens), dataset)

    train_all([whole(rung, seed) for rung in reversed(smaller) for seed in plan.seeds], run.path, runs)
    if not (run.path / FORECAST).is_file():
        write_document(run.path / FORECAST, make_forecast(plan, read_kept(run.path)))
    forecast = read_document(run.path / FORECAST, Forecast)
    sealed, end = seal_forecast(run.path / FORECAST, "ladder", forecast.made_of), forecast.curve[-1]
    foreseen = f"{end.loss:.4f} nats ({end.low:.4f} to {end.high:.4f})"
    print(f"forecast of the largest rung, sealed in {sealed}: {foreseen}", flush=True)
    config = whole(largest, *seeds_of(run.path / FORECAST, 1))
    ranks = min(plan.cores, 2)
    if code := launch(partial(train_one, config, runs, ranks), ranks):
        raise StepFailed(f"training of {config.name}", code)
    keep(directory_of(config, runs), run.path)
    _evaluate(run, plan, runs)
    result, records = derive(run.path)
    write_document(run.path / LADDER, result)
    write_records(run.path / RECORDS, records)
    run.complete()


def _plan(seconds: float, dataset: Path, facts: DatasetFacts) -> LadderPlan:
    corpus = read_document(dataset / DATASET, DataCard).splits["train"].tokens
    vocabulary = facts.padded_vocab_size
    speeds, is_scored = measured_speeds(vocabulary), bool(find_tasks()[0])
    return make_plan(seconds, available_cores(), speeds, vocabulary, corpus, is_scored)


def measured_speeds(vocabulary: int) -> list[float]:
    """Seconds per training token of each shape on one core while all cores are busy."""
    announce(f"about {format_duration(1.5 * TRIED_SECONDS * TRIED_SHAPES)} to measure how fast small models train here")
    seconds = [max(each) for each in zip(*run_forked(partial(_tried, vocabulary), available_cores()), strict=True)]
    sizes = [shape.layers * shape.width**2 * 12 + vocabulary * shape.width for shape in SHAPES]
    return seconds + [seconds[-1] * size / sizes[TRIED_SHAPES - 1] for size in sizes[TRIED_SHAPES:]]


def _tried(vocabulary: int) -> list[float]:
    return [_seconds_per_token(rung_model(shape, vocabulary)) for shape in SHAPES[:TRIED_SHAPES]]


def _seconds_per_token(model: ModelConfig) -> float:
    """Seconds per token of training steps on random tokens."""
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


def _lambada(name: str, path: Path) -> RunningText:
    source = SourceText(name, "LAMBADA as plain text", TEST_SETS["lambada"].sha256)
    return RunningText.of_documents(source, openai_passages(path))


LAST_WORDS = "lambada"
TEXTS: dict[str, tuple[str, Callable[[str, Path], RunningText]]] = {
    "wikitext103": ("wikitext103", partial(read_wikitext, test_set="wikitext103")),
    "wikitext103-valid": ("wikitext103-valid", partial(read_wikitext, test_set="wikitext103-valid")),
    "lambada-text": ("lambada", _lambada),
}
"""Test set of each text and the function that reads it."""


def find_tasks() -> tuple[dict[str, "MakeTask"], dict[str, str]]:
    """The tasks by name whose test set is on this machine, and the reasons for which others are missing."""
    tasks: dict[str, MakeTask] = {}
    missing: dict[str, str] = {}
    for name, test_set in [*((name, text[0]) for name, text in TEXTS.items()), (LAST_WORDS, LAST_WORDS)]:
        try:
            path = find_test_set(test_set)
        except DataMissing as error:
            missing[name] = str(error)
        else:
            tasks[name] = partial(_last_words if name == LAST_WORDS else _running_text, name, path)
    return tasks, missing


def _running_text(name: str, path: Path, evaluated: "EvaluatedCheckpoint") -> Task:
    text, window = TEXTS[name][1](name, path), evaluated.context
    detokenizer = MEGATRON if name.startswith("wikitext") else UNCHANGED
    stream = sliding_stream(text, detokenizer, evaluated.tokenizer, window, window // 2)
    return PerplexityTask(text, stream, evaluated.tokenizer)


def _last_words(name: str, path: Path, evaluated: "EvaluatedCheckpoint") -> Task:
    return openai_lambada(name, path, evaluated.tokenizer, evaluated.context)


def _evaluate(run: RunDirectory, plan: LadderPlan, runs: Path) -> None:
    """Score the first seed of every rung on the published texts that are on this machine."""
    tasks, missing = find_tasks()
    for name, reason in missing.items():
        print(f"{name}: left out; {reason}")
    for each in first_of_rungs(plan, read_kept(run.path)) if tasks else ():
        out = run.path / EVALUATIONS / f"{each.folder.name}.json"
        if not out.is_file():
            done = evaluate(runs / each.folder.name, tasks, Settings()).done
            write_document(out, kept_scores({name: evaluation.result for name, evaluation in done.items()}))
