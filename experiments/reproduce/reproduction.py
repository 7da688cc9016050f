"""A reproduction from raw text to report: a sequence of this suite's public commands, each printed before it runs."""

import shlex
import shutil
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from data_pipeline.config import DataConfig
from data_pipeline.contamination.testsets import find_test_set
from engine.config import RunConfig
from engine.costs import parameter_count
from engine.data.dataset import DatasetFacts
from engine.run.directory import read_steps, read_summary, read_validations
from experiments.launch.scripts import write_launch_files
from experiments.published import published_records
from experiments.reproduce import processes, steps
from experiments.reproduce.kept import EXAMPLES, keep_examples, keep_training, matrix_gflops
from experiments.reproduce.plan import FULL_RECIPE, SMOKE, Plan, training_job, twin_rule
from lineage.config import load_config
from lineage.data_files import DataCard
from lineage.digest import read_digest
from lineage.errors import DataMissing
from lineage.files import (
    Environment,
    ModelShape,
    ReproducedModel,
    ReproductionSummary,
    read_document,
    read_values,
    write_document,
)
from lineage.lock import locked
from lineage.progress import format_duration
from lineage.records import Record, read_records, write_records
from lineage.run import RunDirectory
from lineage.torch_range import check_torch


def reproduce(plan: Plan, runs: Path) -> Path:
    """Data, training, evaluation, records, report; what is already complete is found and said so.

    Returns the reproduction's directory. Raises UnfitTorch before anything else,
    `processes.StepFailed` with the exit code of the command that failed.
    """
    check_torch()
    start = time.monotonic()
    if plan.mode == "full":
        processes.run_step(*steps.preflight_step(plan, runs))
    processes.run_step(*steps.data_step(plan, runs))
    dataset = RunDirectory.open(runs / load_config(plan.recipe, DataConfig).name)
    trained = [_train(plan, config, dataset, runs) for config in plan.configs]
    available = {name: _is_available(name) for name in steps.TASKS}
    size = plan.size
    run = RunDirectory.begin(
        runs,
        f"reproduce-{plan.target}" + (f"-{size.suffix}" if size == SMOKE else ""),
        "reproduction",
        {
            "target": plan.target,
            "mode": plan.mode,
            "windows": size.windows if size else None,
            "examples": size.examples if size else None,
            "test_sets": available,
        },
        {"dataset": DatasetFacts.read(dataset.path).digest} | {run.manifest["name"]: run.digest for run in trained},
    )
    with locked(run.path):
        if run.is_complete:
            run.link()
            print(f"already complete: {run.path}")
        else:
            for config, training in zip(plan.published, trained, strict=True):
                _evaluate(config.name, plan, training, run)
                keep_training(training, run.path / "training" / config.name)
            keep_examples(
                run.path,
                {model.name: steps.evaluation_file(run.path, model.name, "lambada") for model in plan.published},
            )
            for name in ("ledger.json", "dataset.json"):
                shutil.copyfile(dataset.path / name, run.path / name)
            summary = _summary(plan, trained, run)
            write_document(run.path / "summary.json", summary)
            write_records(run.path / "records.jsonl", derived_records(run, summary))
            run.complete()
        page = run.path / "report" / "index.html"
        if not page.is_file():
            for step in steps.report_steps(run.path, runs):
                processes.run_step(*step)
    _print_results(run.path)
    print(f"report: {page}")
    print(f"done in {format_duration(time.monotonic() - start)}")
    return run.path


def _train(plan: Plan, config: RunConfig, dataset: RunDirectory, runs: Path) -> RunDirectory:
    if plan.size is None:
        job = training_job(plan, config, runs).model_copy(update={"dataset": dataset.path})
        write_launch_files(job, steps.launch_folder(config, runs))
    processes.run_step(*steps.train_step(plan, config, runs / dataset.path.name, runs))
    return RunDirectory.open(runs / config.name)


def _evaluate(model: str, plan: Plan, training: RunDirectory, run: RunDirectory) -> None:
    for task in steps.TASKS:
        path = steps.evaluation_file(run.path, model, task)
        is_kept = task != "lambada" or (run.path / EXAMPLES).is_file() or steps.samples_file(path).is_file()
        if not (path.is_file() and is_kept):
            processes.run_step(*steps.evaluation_step(plan, task, training.path, path))


def derived_records(run: RunDirectory, summary: ReproductionSummary) -> list[Record]:
    """Every record of a reproduction, from the summary and from the metrics and evaluations that it keeps."""
    records = list(published_records(tuple(model.name for model in summary.models)))
    for model in summary.models:
        records += _curve_records(model, summary.mode, run)
        for task in steps.TASKS:
            result = read_values(steps.evaluation_file(run.path, model.name, task))
            records.append(_evaluation_record(model, result))
    return records


def _evaluation_record(model: ReproducedModel, result: dict[str, Any]) -> Record:
    quantity, field = {
        "wikitext103": ("wikitext103_perplexity", "perplexity"),
        "lambada": ("lambada_accuracy", "accuracy"),
        "heldout-perplexity": ("heldout_perplexity", "perplexity"),
        "heldout-cloze": ("heldout_cloze_accuracy", "accuracy"),
    }[result["task"]]
    percent = field == "accuracy"
    scored = f"{result['num_examples']:,} examples" if percent else f"{result['num_scored_tokens']:,} tokens"
    note = f"partial: {scored} scored" if result["partial"] else ""
    return Record(
        experiment="2019/table-3",
        series=model.name,
        quantity=quantity,
        value=result[field] * (100 if percent else 1),
        unit="%" if percent else "",
        kind=result["kind"],
        source=model.run,
        digest=result["checkpoint_digest"],
        seed=model.seed,
        note=note,
    )


def _curve_records(model: ReproducedModel, mode: str, run: RunDirectory) -> list[Record]:
    origin: dict[str, Any] = {
        "series": model.name,
        "kind": "scaled" if mode == "scaled" else "measured",
        "source": model.run,
        "digest": run.manifest["parents"][model.run.rpartition("-")[0]],
        "seed": model.seed,
        "x_name": "iteration",
    }
    kept = run.path / "training" / model.name
    means = read_steps(kept)
    block = means[0].iteration if means else 1
    records = [
        Record(
            experiment="2019/training-loss",
            quantity="training_loss",
            value=mean.loss,
            x=mean.iteration,
            note=f"mean of {block} iterations" if block > 1 else "",
            **origin,
        )
        for mean in means
        if mean.iteration % block == 0
    ]
    experiments = {
        "validation": ("2019/figure-6", "validation_perplexity"),
        "final-validation": ("2019/validation", "final_validation_perplexity"),
    }
    for validation in read_validations(kept):
        if validation.iteration:
            experiment, quantity = experiments[validation.kind]
            value, x = validation.perplexity, validation.iteration
            records.append(Record(experiment=experiment, quantity=quantity, value=value, x=x, **origin))
    return records


def _summary(plan: Plan, trained: list[RunDirectory], run: RunDirectory) -> ReproductionSummary:
    started = Environment.model_validate(run.manifest["environment"])
    models = []
    for published, training in zip(plan.published, trained, strict=True):
        model = reproduced_model(published, training)
        gflops = matrix_gflops(read_summary(training.path).layout.ranks)
        models.append(model.model_copy(update={"matrix_gflops": gflops}))
    return ReproductionSummary(
        target=plan.target,
        mode="scaled" if plan.size else "full",
        reason=plan.reason,
        source=read_document(run.path / "dataset.json", DataCard).source,
        twin_rule=twin_rule(plan.configs[0]),
        models=models,
        hardware=hardware_of(started),
        commit=str(started.source.get("commit") or ""),
        commands=dict.fromkeys(("figure-6", "training-loss", "table-3", "ledger", "models"), _shown_command(plan)),
    )


def reproduced_model(published: RunConfig, training: RunDirectory) -> ReproducedModel:
    """What the run that was trained in a published model's name says of itself."""
    done = read_summary(training.path)
    return ReproducedModel(
        name=published.name,
        run=training.path.name,
        published=shape_of(published),
        trained=shape_of(RunConfig.model_validate(training.manifest["config"])),
        seed=done.seed,
        tokens=done.tokens,
        train_seconds=done.train_seconds,
        tokens_per_second=done.tokens_per_second,
        checkpoint_digest=read_digest(training.path / "checkpoints" / done.checkpoint),
    )


def hardware_of(started: Environment) -> str:
    """Processor, cores, memory and GPUs."""
    memory, gpus = started.memory_bytes, ", ".join(started.gpus)
    return (
        f"{started.cpu}, {started.cores} cores"
        + (f", {memory / 2**30:.0f} GiB" if memory else "")
        + (f"; {gpus}" if gpus else "")
    )


def _shown_command(plan: Plan) -> str:
    """What makes this again."""
    own_recipe = plan.recipe != (plan.size.recipe if plan.size else FULL_RECIPE)
    options = [
        *(["--smoke"] if plan.size == SMOKE else []),
        *(["--data", steps.shown(plan.recipe)] if own_recipe else []),
    ]
    return shlex.join(["mlm-experiment", "reproduce", plan.target, *options])


def shape_of(config: RunConfig) -> ModelShape:
    """Shape, size and length of training of a recipe's model."""
    values = config.model.model_dump() | config.train.model_dump() | {"parameters": parameter_count(config.model)}
    return ModelShape.model_validate(values)


def _print_results(directory: Path) -> None:
    records = [r for r in read_records(directory / "records.jsonl") if r.kind != "published"]
    final = {r.series: r.value for r in records if r.quantity == "final_validation_perplexity"}
    for name, value in final.items():
        scores = ", ".join(
            f"{r.quantity.replace('_', ' ')} {r.value:.2f}{r.unit}{' (partial)' if r.note else ''}"
            for r in records
            if r.series == name and r.experiment == "2019/table-3"
        )
        print(f"{name}: validation perplexity {value:.2f}; {scores}")
    if len(final) > 1:
        values = list(final.values())
        falls = all(larger < smaller for smaller, larger in pairwise(values))
        print(
            f"Figure 6's order, larger models reach lower perplexity: {'holds' if falls else 'DOES NOT HOLD'} "
            f"({' > '.join(final)})"
        )


def _is_available(name: str) -> bool:
    try:
        find_test_set(name)
    except DataMissing:
        return False
    return True
