"""A reproduction from raw text to report: a sequence of this suite's public commands, each printed before it runs."""

import shlex
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from mlm_repro.data_pipeline.config import DataConfig
from mlm_repro.data_pipeline.contamination.testsets import find_gpt2_vocabulary, find_test_set
from mlm_repro.data_pipeline.files import DATASET, LEDGER, DataCard
from mlm_repro.engine.data.dataset import DatasetFacts
from mlm_repro.engine.run.files import (
    SUMMARY,
)
from mlm_repro.experiments.files import (
    SCORES,
    ReproductionScores,
    join_evaluations,
    read_evaluations,
    write_runs,
)
from mlm_repro.experiments.launch.job import write_launch_files
from mlm_repro.experiments.reproduce import steps
from mlm_repro.experiments.reproduce.derived import Derivation, keep_training
from mlm_repro.experiments.reproduce.files import ReproductionSummary
from mlm_repro.experiments.reproduce.plan import (
    FULL_RECIPE,
    SMOKE,
    Plan,
    expected_seconds,
    model_name,
    training_job,
)
from mlm_repro.experiments.scores import END, order_verdict
from mlm_repro.lineage.config import load_config
from mlm_repro.lineage.errors import DataMissing
from mlm_repro.lineage.extras import check_torch
from mlm_repro.lineage.files import read_document, write_document
from mlm_repro.lineage.lock import locked
from mlm_repro.lineage.progress import format_duration
from mlm_repro.lineage.records import RECORDS, read_records, write_records
from mlm_repro.lineage.run import RunDirectory


def reproduce(plan: Plan, runs: Path) -> Path:
    """Data, training, evaluation, records, report; what is already complete is found and said so.

    Returns the reproduction's directory. Raises BadInput for an unfit torch before anything else,
    `steps.StepFailed` with the exit code of the command that failed.
    """
    check_torch()
    course = steps.Course(expected_seconds(plan))
    published = _are_here(partial(find_test_set, "wikitext103"), find_gpt2_vocabulary)
    course.begin("first results")
    with TemporaryDirectory() as scratch:
        for step in steps.first_steps(plan, runs, Path(scratch) if published else None):
            steps.run_step(*step)
    course.begin("making the text")
    steps.run_step(*steps.data_step(plan, runs))
    dataset = RunDirectory.open_named(runs, load_config(plan.recipe, DataConfig).name)
    card = read_document(dataset.path / DATASET, DataCard)
    counts = ", ".join(f"{split.tokens:,} tokens in {name}" for name, split in card.splits.items())
    print(f"text: {card.source}; {counts}; vocabulary {card.vocab_size:,}", flush=True)
    trained = []
    for config in plan.configs:
        course.begin(f"training {config.name.replace('-', ' ')}")
        if plan.size is None:
            job = training_job(plan, config, runs).model_copy(update={"dataset": dataset.path})
            write_launch_files(job, steps.launch_folder(config, runs))
        steps.run_step(*steps.train_step(plan, config, runs / dataset.path.name, runs))
        trained.append(RunDirectory.open_named(runs, config.name))
    course.begin("scoring the models")
    available = {name: _are_here(partial(find_test_set, name)) for name in steps.TASKS}
    size = plan.size
    run = RunDirectory.begin(
        runs,
        f"reproduce-{plan.target}" + (f"-{size.suffix}" if size == SMOKE else ""),
        "reproduction",
        {
            "target": plan.target, "mode": plan.mode, "windows": size.windows if size else None,
            "examples": size.examples if size else None, "test_sets": available,
        },
        {"dataset": DatasetFacts.read(dataset.path).digest} | {run.manifest["name"]: run.digest for run in trained},
    )  # fmt: skip
    with locked(run.path):
        if run.is_complete:
            run.link()
            print(f"already complete: {run.path}")
        else:
            done = read_evaluations(run.path)
            for training in trained:
                name = model_name(training.manifest["name"])
                for task in steps.TASKS:
                    if steps.evaluation_name(name, task) not in done:
                        out = steps.evaluation_file(run.path, name, task)
                        steps.run_step(*steps.evaluation_step(plan, task, training.path, out))
            join_evaluations(run.path)
            write_runs(run.path, [keep_training(training.path) for training in trained])
            for name in (LEDGER, DATASET):
                shutil.copyfile(dataset.path / name, run.path / name)
            commands = dict.fromkeys(("figure-6", "training-loss", "table-3", "ledger", "models"), _shown_command(plan))
            mode: Literal[scaled, full] = "scaled" if plan.size else "full"
            made = Derivation(
                run.path, ReproductionSummary(target=plan.target, mode=mode, reason=plan.reason, commands=commands)
            )
            write_document(run.path / SUMMARY, made.summary)
            write_document(run.path / SCORES, made.scores)
            write_records(run.path / RECORDS, made.records)
            if published:
                steps.run_step(*steps.words_step(run.path))
            steps.run_step(*steps.prediction_step(run.path))
            run.complete()
        page = run.path / "report" / "index.html"
        course.begin("making the page")
        if not page.is_file():
            steps.run_step(*steps.report_step(run.path, runs))
    _print_results(run.path)
    print(f"report: {page}")
    print(f"done in {format_duration(course.elapsed)}")
    return run.path


def _shown_command(plan: Plan) -> str:
    seeds = len(plan.configs) // len({published.name for published in plan.published})
    own_recipe = plan.recipe != (plan.size.recipe if plan.size else FULL_RECIPE)
    options = [
        *(["--smoke"] if plan.size == SMOKE else []),
        *(["--seeds", str(seeds)] if seeds > 1 else []),
        *(["--data", steps.shown(plan.recipe)] if own_recipe else []),
    ]
    return shlex.join(["mlm-experiment", "reproduce", plan.target, *options])


def _print_results(directory: Path) -> None:
    records = [record for record in read_records(directory / RECORDS) if record.kind != "published"]
    for record in records:
        if record.x is None or record.quantity == END:
            seeds = record.note if record.seed is None else f"seed {record.seed}"
            print(f"{record.series}: {record.quantity.replace('_', ' ')} {record.value:,.4g} {record.unit} ({seeds})")
    scores = read_document(directory / SCORES, ReproductionScores)
    print(*scores.sentences(), order_verdict(records, scores), sep="\n")


def _are_here(*find: Callable[[], object]) -> bool:
    try:
        for look_up in find:
            look_up()
    except DataMissing:
        return False
    return True
