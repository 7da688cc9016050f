"""A reproduction from raw text to report: a sequence of this suite's public commands, each printed
before it runs."""

import math
import shlex
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, harmonic_mean

from mlm_repro.data_pipeline.config import DataConfig
from mlm_repro.data_pipeline.contamination.testsets import find_gpt2_vocabulary, find_test_set
from mlm_repro.data_pipeline.files import DATASET, LEDGER, DataCard
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.costs import parameter_count
from mlm_repro.engine.data.dataset import DatasetFacts
from mlm_repro.engine.run.files import (
    SUMMARY,
    Step,
    TrainingSummary,
    Validation,
    read_steps,
    read_summary,
    read_validations,
    steps_in,
    validations_in,
)
from mlm_repro.evaluation.schema import ClozeResult, PerplexityResult
from mlm_repro.experiments.files import (
    EVALUATIONS,
    EVALUATIONS_APART,
    SCORES,
    KeptRun,
    ReproductionScores,
    join_evaluations,
    origin_of,
    read_evaluations,
    read_runs,
    write_runs,
)
from mlm_repro.experiments.launch.job import write_launch_files
from mlm_repro.experiments.published import published_records
from mlm_repro.experiments.reproduce import steps
from mlm_repro.experiments.reproduce.files import ModelShape, ReproducedModel, ReproductionSummary
from mlm_repro.experiments.reproduce.plan import (
    FULL_RECIPE,
    SMOKE,
    Plan,
    folder_of,
    model_name,
    training_job,
    twin_rule,
)
from mlm_repro.experiments.scores import END, compared, order_verdict, text_score
from mlm_repro.experiments.sealed import format_records
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.chain import CHECKPOINTS
from mlm_repro.lineage.config import load_config
from mlm_repro.lineage.digest import read_digest
from mlm_repro.lineage.errors import DataMissing
from mlm_repro.lineage.extras import check_torch
from mlm_repro.lineage.files import (
    Environment,
    Manifest,
    parse_document,
    read_document,
    write_document,
)
from mlm_repro.lineage.lock import locked
from mlm_repro.lineage.progress import format_duration
from mlm_repro.lineage.records import RECORDS, Record, read_records, write_records
from mlm_repro.lineage.run import MANIFEST, RunDirectory

OTHER_STEPS = 3
"""Steps beside the trainings: the text, the scores and the page."""
CURVE_POINTS = 200
"""Number of blocks, roughly, in which a training's iterations are averaged."""
UNITS_OF_TWINS = ("bits_per_byte", "log_likelihood")
"""Ends of the names of the quantities that compare twins; the paper states none of these."""
RESULTS: dict[str, type[PerplexityResult | ClozeResult]] = dict(
    zip(steps.TASKS, (PerplexityResult, ClozeResult), strict=True)
)
"""Classes of the results of a reproduction's evaluations, by task."""


def reproduce(plan: Plan, runs: Path) -> Path:
    """Make the data, trainings, evaluations, records and report that `plan`, the Plan of one
    reproduction, asks for, below the folder `runs` and by public commands, one after the other, and
    print the results; complete parts are found and not repeated.

    Returns the path of the reproduction's directory. Raises BadInput for an unfit torch before
    anything else, and if another process works in that directory; `steps.StepFailed`, with the
    documented exit code, if a command failed, also because it was stopped; Interrupted if this
    process was stopped and the command ended well.
    """
    check_torch()
    start = time.monotonic()
    count = len(plan.configs) + OTHER_STEPS
    steps.say_step(1, count, "making the text")
    steps.run_step("mlm-data", "run", steps.shown(plan.recipe), "--runs", str(runs))
    dataset = RunDirectory.open_named(runs, load_config(plan.recipe, DataConfig).name)
    card = read_document(dataset.path / DATASET, DataCard)
    counts = ", ".join(f"{split.tokens:,} tokens in {name}" for name, split in card.splits.items())
    print(f"text: {card.source}; {counts}; vocabulary {card.vocab_size:,}", flush=True)
    trained = []
    for number, config in enumerate(plan.configs, 2):
        steps.say_step(number, count, f"training {config.name.replace('-', ' ')}")
        if plan.size is None:
            write_launch_files(
                training_job(config, runs, dataset.path), steps.launch_folder(config, runs)
            )
        folder = folder_of(config.name, runs)
        steps.run_step(*steps.train_step(plan, config, runs / dataset.path.name, folder))
        trained.append(RunDirectory.open_named(folder, config.name))
    steps.say_step(count - 1, count, "scoring the models")
    available = {name: _are_here(partial(find_test_set, name)) for name in steps.TASKS}
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
        {"dataset": DatasetFacts.read(dataset.path).digest}
        | {run.manifest["name"]: run.digest for run in trained},
    )
    with locked(run.path):
        if run.is_complete:
            run.link()
            print(f"already complete: {run.path}")
            if other := run.other_code:
                print(f"note: {other}", file=sys.stderr)
        else:
            done = read_evaluations(run.path)
            for training in trained:
                model = model_name(training.manifest["name"])
                for task in steps.TASKS:
                    name = steps.evaluation_name(model, task)
                    if name not in done:
                        out = run.path / EVALUATIONS_APART / f"{name}.json"
                        steps.run_step(*steps.evaluation_step(plan, task, training.path, out))
            join_evaluations(run.path)
            write_runs(run.path, map(keep_training, trained))
            for name in (LEDGER, DATASET):
                shutil.copyfile(dataset.path / name, run.path / name)
            summary = _summary(plan, trained, run)
            write_document(run.path / SUMMARY, summary)
            write_document(run.path / SCORES, derived_scores(run, summary))
            write_records(run.path / RECORDS, derived_records(run, summary))
            if _are_here(partial(find_test_set, "wikitext103"), find_gpt2_vocabulary):
                words = ["mlm-experiment", "run", "2019/words", "--runs", steps.shown(run.path)]
                steps.run_step(*words)
            run.complete()
        page = run.path / "report" / "index.html"
        steps.say_step(count, count, "making the page")
        if not page.is_file():
            steps.run_step("mlm-report", "build", steps.shown(run.path), str(runs))
    _print_results(run.path)
    print(f"report: {page}")
    print(f"done in {format_duration(time.monotonic() - start)}")
    return run.path


def keep_training(training: RunDirectory) -> KeptRun:
    """Return the KeptRun, a line of runs.jsonl, that a reproduction keeps of a training: its
    manifest, seal and summary, and as metrics its validations and means over roughly CURVE_POINTS
    blocks of iterations, by iteration. Lines of metrics.jsonl from a damaged one on are left out.
    Raises IntegrityFailure if another of these files is damaged or a line does not fit its schema,
    and BadInput without a manifest.

    Losses, rates, norms, loss scales and seconds are means over the block that ends at `iteration`;
    tokens/s and TFLOP/s are the block's work over its time.
    """
    steps = read_steps(training.path)
    block = max(len(steps) // CURVE_POINTS, 1)
    lines: list[Step | Validation] = [
        _mean(steps[start : start + block]) for start in range(0, len(steps), block)
    ]
    lines += read_validations(training.path)
    lines.sort(key=lambda line: line.iteration)
    return KeptRun.of(
        training.path,
        name=model_name(training.manifest["name"]),
        metrics=[line.to_json() for line in lines],
    )


def _mean(steps: Sequence[Step]) -> Step:
    norms = [step.gradient_norm for step in steps if step.gradient_norm is not None]
    return Step(
        kind="train",
        iteration=steps[-1].iteration,
        loss=fmean(step.loss for step in steps),
        learning_rate=fmean(step.learning_rate for step in steps),
        gradient_norm=fmean(norms) if norms else None,
        loss_scale=fmean(step.loss_scale for step in steps),
        seconds=fmean(step.seconds for step in steps),
        tokens_per_second=harmonic_mean([step.tokens_per_second for step in steps]),
        model_tflops=harmonic_mean([step.model_tflops for step in steps]),
    )


def derived_records(run: RunDirectory, summary: ReproductionSummary) -> list[Record]:
    """Return a list of every Record of the reproduction in the directory `run`: the published ones
    about the models of `summary`, and the ones that follow from `summary` and from the metrics and
    evaluations in that directory. A model without kept metrics has none along its curve. Nothing is
    written.

    A run of an earlier version, which has no scores.json, gets neither bits per byte nor
    log-likelihoods nor means over seeds. Raises IntegrityFailure if a result is missing or has
    another form than its protocol's, or if one of the run's files is damaged.
    """
    records = list(
        published_records(tuple(dict.fromkeys(model.series for model in summary.models)))
    )
    lines = read_runs(run.path)
    results = results_of(run.path, summary)
    for model in summary.models:
        if training := lines.get(model.name):
            records += _curve_records(model, summary.mode, run, training)
        for task in RESULTS:
            records += _evaluation_records(model, results[steps.evaluation_name(model.name, task)])
    if not (run.path / SCORES).is_file():
        return [record for record in records if not record.quantity.endswith(UNITS_OF_TWINS)]
    return [*records, *_bands(records, run)]


def results_of(
    reproduction: Path, summary: ReproductionSummary
) -> dict[str, PerplexityResult | ClozeResult]:
    """Return a dict of the results, each a PerplexityResult or a ClozeResult, that the directory
    `reproduction` has of the models of `summary`: one for each model and protocol, whose names with
    a hyphen between them are the key.

    Raises IntegrityFailure if a result is missing, is twice in evaluations.jsonl or has another
    form than its protocol's, or if a file of results is damaged.
    """
    lines = read_evaluations(reproduction)
    results = {}
    for model in summary.models:
        for task, schema in RESULTS.items():
            name = steps.evaluation_name(model.name, task)
            results[name] = parse_document(lines.get(name), schema, f"{name} in {EVALUATIONS}")
    return results


def _bands(records: list[Record], run: RunDirectory) -> Iterator[Record]:
    """Yield a Record, without a seed, for each model and each of its quantities (bits per byte,
    log-likelihood and final validation perplexity) that has records of several seeds: the mean over
    the seeds. Minimum and maximum stand in its note, and the reproduction `run` is its origin.
    `records` has the record of each seed, and may have others."""
    of_seeds = defaultdict(list)
    for record in records:
        if record.seed is not None and record.quantity.endswith((*UNITS_OF_TWINS, END)):
            of_seeds[record.series, record.quantity].append(record)
    source = origin_of(read_document(run.path / MANIFEST, Manifest))
    for same in of_seeds.values():
        if len(same) > 1:
            values = [record.value for record in same]
            note = f"mean of {len(same)} seeds, {min(values):.5g} to {max(values):.5g}"
            yield same[0].model_copy(
                update={**source, "value": fmean(values), "seed": None, "note": note}
            )


def derived_scores(run: RunDirectory, summary: ReproductionSummary) -> ReproductionScores:
    """Return a ReproductionScores, the paired differences between models that are neighbours in
    size, derived from the WikiText-103 results that the directory of the reproduction `run` keeps
    of the models of `summary`. The summary must have the models smallest first. A text of one
    article, or a single size, gives no differences. Raises IntegrityFailure if a result of any
    protocol is missing, is there twice or has another form than its protocol's, or if a file of
    results is damaged."""
    by_size = defaultdict(list)
    results = results_of(run.path, summary)
    for model in summary.models:
        result = results[steps.evaluation_name(model.name, steps.TASKS[0])]
        assert isinstance(result, PerplexityResult)
        by_size[model.series].append(text_score(result))
    scores = [*by_size.values()]
    articles = len(scores[0][0].nll)
    larger = range(1, len(scores)) if articles > 1 else ()
    comparisons = [compared(result.task, index - 1, index, scores) for index in larger]
    return ReproductionScores(
        text=result.task,
        articles=articles,
        seeds=len(scores[0]),
        models=[*by_size],
        comparisons=comparisons,
    )


def _evaluation_records(
    model: ReproducedModel, result: PerplexityResult | ClozeResult
) -> Iterator[Record]:
    if isinstance(result, PerplexityResult):
        numbers = {
            "perplexity": (result.perplexity, ""),
            "bits_per_byte": (result.bits_per_byte, ""),
        }
        scored = f"{result.num_scored_tokens:,} tokens"
    else:
        numbers = {
            "accuracy": (result.accuracy * 100, "%"),
            "log_likelihood": (-math.log(result.perplexity), "nats"),
        }
        scored = f"{result.num_examples:,} examples"
    text = result.task.removesuffix("-perplexity").replace("-", "_")
    for name, (value, unit) in numbers.items():
        assert value is not None  # a held-out text has words
        yield Record(
            experiment="2019/table-3",
            series=model.series,
            quantity=f"{text}_{name}",
            value=value,
            unit=unit,
            kind=result.kind,
            source=model.run,
            digest=result.checkpoint_digest,
            seed=model.seed,
            note=f"partial: {scored} scored" if result.partial else "",
        )


def _curve_records(
    model: ReproducedModel, mode: str, run: RunDirectory, training: KeptRun
) -> list[Record]:
    origin: JSON = {
        "series": model.series,
        "kind": "scaled" if mode == "scaled" else "measured",
        "source": model.run,
        "digest": run.manifest["parents"][model.run.rpartition("-")[0]],
        "seed": model.seed,
        "x_name": "iteration",
    }
    means = steps_in(training.metrics)
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
    targets = {
        "validation": ("2019/figure-6", "validation_perplexity"),
        "final-validation": ("2019/validation", END),
    }
    for validation in validations_in(training.metrics):
        if validation.iteration:
            experiment, quantity = targets[validation.kind]
            records.append(
                Record(
                    experiment=experiment,
                    quantity=quantity,
                    value=validation.perplexity,
                    x=validation.iteration,
                    **origin,
                )
            )
    return records


def _summary(plan: Plan, trained: list[RunDirectory], run: RunDirectory) -> ReproductionSummary:
    started = Environment.model_validate(run.manifest["environment"])
    return ReproductionSummary(
        target=plan.target,
        mode="scaled" if plan.size else "full",
        reason=plan.reason,
        source=read_document(run.path / DATASET, DataCard).source,
        twin_rule=twin_rule(plan.configs[0]),
        models=list(map(reproduced_model, plan.published, trained)),
        hardware=hardware_of(started),
        commit=str(started.source.get("commit") or ""),
        commands=dict.fromkeys(
            ("figure-6", "training-loss", "table-3", "ledger", "models"), _shown_command(plan)
        ),
    )


def reproduced_model(published: RunConfig, training: RunDirectory) -> ReproducedModel:
    """Return the ReproducedModel, an entry of a reproduction's summary.json, for the published
    model whose recipe is `published`, which gives the published sizes alone. `training` is the
    directory of the complete training that reproduces it; name, sizes, speed and the digest of its
    last checkpoint are read from there. Raises IntegrityFailure if a file there cannot be read."""
    done = read_summary(training.path)
    return ReproducedModel(
        name=model_name(training.manifest["name"]),
        run=training.path.name,
        published=shape_of(published),
        checkpoint_digest=read_digest(training.path / CHECKPOINTS / done.checkpoint),
        **facts_of(RunConfig.model_validate(training.manifest["config"]), done),
    )


def facts_of(config: RunConfig, done: TrainingSummary) -> JSON:
    """Return, as a dict, the fields of a ReproducedModel that its training's configuration and
    summary give: `trained`, the model's shape, and `seed`, `tokens`, `train_seconds` and
    `tokens_per_second`."""
    facts = done.model_dump(include={"seed", "tokens", "train_seconds", "tokens_per_second"})
    return facts | {"trained": shape_of(config)}


def hardware_of(started: Environment) -> str:
    """Return the processor, number of cores, memory in GiB and names of the GPUs of an Environment,
    as a run's manifest records it, as one text: `NAME, 8 cores, 64 GiB; GPU, GPU`. Memory that is
    not known and absent GPUs are left out with the sign before them."""
    memory = f", {started.memory_bytes / 2**30:.0f} GiB" if started.memory_bytes else ""
    gpus = f"; {', '.join(started.gpus)}" if started.gpus else ""
    return f"{started.cpu}, {started.cores} cores{memory}{gpus}"


def _shown_command(plan: Plan) -> str:
    seeds = len(plan.configs) // len({published.name for published in plan.published})
    own_recipe = plan.recipe != (plan.size.recipe if plan.size else FULL_RECIPE)
    options = [
        *(["--smoke"] if plan.size == SMOKE else []),
        *(["--seeds", str(seeds)] if plan.size and seeds != plan.size.seeds else []),
        *(["--data", steps.shown(plan.recipe)] if own_recipe else []),
    ]
    return shlex.join(["mlm-experiment", "reproduce", plan.target, *options])


def shape_of(config: RunConfig) -> ModelShape:
    """Return a ModelShape of `config`: the shape and number of parameters of its model, and the
    length and learning rate of its training."""
    values = (
        config.model.model_dump()
        | config.train.model_dump()
        | {"parameters": parameter_count(config.model)}
    )
    return ModelShape.model_validate(values)


def _print_results(directory: Path) -> None:
    records = [record for record in read_records(directory / RECORDS) if record.kind != "published"]
    labels = read_document(directory / SUMMARY, ReproductionSummary).labels
    shown = []
    for record in records:
        # A twin's perplexity of words says nothing.
        meaningless = record.kind == "scaled" and record.quantity.endswith("_perplexity")
        if record.seed is not None and (
            record.quantity == END or (record.x is None and not meaningless)
        ):
            shown.append(record.model_copy(update={"series": labels[record.series]}))
    print(format_records(shown))
    scores = read_document(directory / SCORES, ReproductionScores)
    print(*scores.sentences(labels), order_verdict(records, scores, labels), sep="\n")


def _are_here(*find: Callable[[], object]) -> bool:
    try:
        for look_up in find:
            look_up()
    except DataMissing:
        return False
    return True
