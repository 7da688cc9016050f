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

from data_pipeline.config import DataConfig
from data_pipeline.contamination.testsets import TEST_SETS, find_test_set
from data_pipeline.files import DATASET, DataCard
from engine.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from engine.data.dataset import DatasetFacts
from engine.launch.forked import run_forked
from engine.launch.mesh import local_device
from engine.parallel.mesh import serial_mesh
from evaluation.documents import RunningText
from evaluation.evaluate import evaluate
from evaluation.lambada import openai_lambada, openai_passages
from evaluation.perplexity import UNCHANGED, Detokenizer, PerplexityTask, sliding_stream
from evaluation.protocol import SourceText, Task
from evaluation.settings import Settings
from evaluation.wikitext103 import MEGATRON, read_wikitext
from experiments.files import EVALUATIONS, LADDER, PLAN, Forecast, LadderPlan
from experiments.forecast.ladder import (
    KeptRungs,
    derive,
    first_of_rungs,
    format_ladder,
    kept_scores,
    make_forecast,
)
from experiments.forecast.ladder_plan import (
    BATCH_SIZE,
    SHAPES,
    describe_plan,
    make_plan,
    rung_model,
    trial_configs,
    whole_configs,
)
from experiments.forecast.study import train_all, try_forecast
from experiments.iterations import TrainingSize, our_step
from experiments.reproduce.processes import run_step
from experiments.reproduce.steps import shown
from lineage.config import load_config
from lineage.environment import available_cores
from lineage.errors import DataMissing
from lineage.files import read_document, write_document
from lineage.lock import locked
from lineage.progress import announce, format_duration
from lineage.records import Record
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

    def train_smaller() -> Forecast:
        trials = trial_configs(plan, dataset)
        train_all([config for rung in reversed(smaller) for config in trials[rung]], run.path, runs)
        rates = KeptRungs(run.path).rates
        print(rates, flush=True)
        wholes = (whole_configs(plan, rates, rung, plan.seeds, dataset) for rung in reversed(smaller))
        train_all([config for configs in wholes for config in configs], run.path, runs)
        return make_forecast(plan, KeptRungs(run.path).smaller())

    def foreseen(_: Forecast, seeds: list[int]) -> list[RunConfig]:
        return whole_configs(plan, KeptRungs(run.path).rates, largest, seeds, dataset)

    def judge() -> list[Record]:
        _evaluate(run, runs)
        result, records = derive(run.path)
        write_document(run.path / LADDER, result)
        return records

    try_forecast(run, runs, Forecast, train_smaller, 1, foreseen, judge, ranks=min(plan.cores, 2))


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
    """Seconds per token of training steps on made-up tokens."""
    train = TrainConfig(global_batch_size=BATCH_SIZE, microbatch_size=BATCH_SIZE // 2, precision="fp32")
    size = TrainingSize(model, train)
    step = our_step(size, ParallelConfig(), serial_mesh(local_device()), microbatches=2)
    step(0, 0.0)
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < TRIED_SECONDS:
        steps += 1
        step(steps, 0.0)
    return (time.perf_counter() - start) / (steps * size.tokens)


def _wikitext(name: str, path: Path, evaluated: "EvaluatedCheckpoint") -> Task:
    return scored_by_halves(read_wikitext(name, path, test_set=name), MEGATRON, evaluated)


def _lambada_text(name: str, path: Path, evaluated: "EvaluatedCheckpoint") -> Task:
    source = SourceText(name, "LAMBADA as plain text", TEST_SETS["lambada"].sha256)
    return scored_by_halves(RunningText.of_documents(source, openai_passages(path)), UNCHANGED, evaluated)


def scored_by_halves(text: RunningText, detokenizer: Detokenizer, evaluated: "EvaluatedCheckpoint") -> Task:
    """The perplexity of a text, in windows that overlap by half."""
    window = evaluated.context
    stream = sliding_stream(text, detokenizer, evaluated.tokenizer, window, window // 2)
    return PerplexityTask(text, stream, evaluated.tokenizer)


def _last_words(name: str, path: Path, evaluated: "EvaluatedCheckpoint") -> Task:
    return openai_lambada(name, path, evaluated.tokenizer, evaluated.context)


TASKS: dict[str, tuple[str, Callable[[str, Path, "EvaluatedCheckpoint"], Task]]] = {
    "wikitext103": ("wikitext103", _wikitext),
    "wikitext103-valid": ("wikitext103-valid", _wikitext),
    "lambada-text": ("lambada", _lambada_text),
    "lambada": ("lambada", _last_words),
}
"""Test set of each task and the function that makes it."""


def find_tasks() -> tuple[dict[str, "MakeTask"], dict[str, str]]:
    """The tasks by name whose test set is on this machine, and the reasons for which others are missing."""
    tasks: dict[str, MakeTask] = {}
    missing: dict[str, str] = {}
    for name, (test_set, task) in TASKS.items():
        try:
            tasks[name] = partial(task, name, find_test_set(test_set))
        except DataMissing as error:
            missing[name] = str(error)
    return tasks, missing


def _evaluate(run: RunDirectory, runs: Path) -> None:
    """Score the first seed of every rung on the published texts that are on this machine."""
    tasks, missing = find_tasks()
    for name, reason in missing.items():
        print(f"{name}: left out; {reason}")
    for each in first_of_rungs(KeptRungs(run.path).all()) if tasks else ():
        out = run.path / EVALUATIONS / f"{each.folder.name}.json"
        if not out.is_file():
            done = evaluate(runs / each.folder.name, tasks, Settings()).done
            write_document(out, kept_scores({name: evaluation.result for name, evaluation in done.items()}))
