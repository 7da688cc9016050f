"""Makes a ladder: data, trials of rates, trainings side by side, forecast, the largest rung, verdict.

Finished models are scored on WikiText-103 and LAMBADA by the published protocols.
"""

import shutil
import time
from pathlib import Path

from data_pipeline.config import DataConfig
from data_pipeline.files import DATASET, DataCard
from engine.config import RunConfig
from engine.data.dataset import DatasetFacts
from evaluation.evaluate import evaluate, named_task
from evaluation.settings import Settings
from experiments.files import EVALUATIONS, LADDER, PLAN, Forecast, LadderPlan
from experiments.forecast.ladder import (
    KeptRungs,
    derive,
    describe_plan,
    first_of_rungs,
    format_ladder,
    kept_scores,
    make_forecast,
    make_plan,
    trial_configs,
    whole_configs,
)
from experiments.forecast.study import train_all, try_forecast
from experiments.reproduce.steps import TASKS, run_step, shown
from lineage.config import load_config
from lineage.environment import available_cores
from lineage.errors import DataMissing
from lineage.files import read_document, write_document
from lineage.lock import locked
from lineage.progress import format_duration
from lineage.records import Record
from lineage.run import RunDirectory


def climb(rungs: int, recipe: Path, runs: Path, dry_run: bool = False) -> None:
    """Make or continue the ladder of so many rungs. Finished parts are reused.

    Raises BadInput for a corpus that is too small, StepFailed if a command of the sequence fails, Interrupted after
    SIGTERM or Ctrl-C.
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
    run = RunDirectory.begin(runs, "ladder", "ladder", {"rungs": rungs, "cores": plan.cores}, facts.parents)
    with locked(run.path):
        if run.is_complete:
            run.link()
        else:
            write_document(run.path / PLAN, plan)
            make_ladder(run, dataset, runs)
    run_step("mlm-report", "figure", "ladder", str(run.path), "--out", str(run.path / "report"))
    print(f"{format_ladder(run.path)}\n{run.path}\ndone in {format_duration(time.monotonic() - start)}")


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


def _evaluate(run: RunDirectory, runs: Path) -> None:
    """Score the first seed of every rung, on held-out documents where a published test is missing."""
    for each in first_of_rungs(KeptRungs(run.path).all()):
        out = run.path / EVALUATIONS / f"{each.folder.name}.json"
        if not out.is_file():
            try:
                done = evaluate(runs / each.folder.name, {name: named_task(name) for name in TASKS}, Settings()).done
            except DataMissing as error:
                print(f"not scored: {error}")
                return
            write_document(out, kept_scores([evaluation.result for evaluation in done.values()]))
