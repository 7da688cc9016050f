"""The files of a reproduction as functions of its trainings, its dataset and each other. Imports no torch."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean, harmonic_mean
from typing import Any

from mlm_repro.data_pipeline.derived import card_by_ledger, ledger_by_itself
from mlm_repro.data_pipeline.files import DATASET, LEDGER, DataCard, Ledger, named_datasets
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.costs import parameter_count
from mlm_repro.engine.run.derived import recipe
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
from mlm_repro.engine.run.resolved import read_run_config
from mlm_repro.evaluation.protocol import Task
from mlm_repro.evaluation.recount import follows, task_of
from mlm_repro.evaluation.schema import ClozeResult, PerplexityResult
from mlm_repro.experiments.files import (
    EVALUATIONS,
    SCORES,
    KeptRun,
    ReproductionScores,
    TextScore,
    read_evaluations,
    read_runs,
)
from mlm_repro.experiments.forecast.trainings import origin_of
from mlm_repro.experiments.kept import kept_trainings
from mlm_repro.experiments.published import published_records
from mlm_repro.experiments.reproduce.files import LADDER, ModelShape, ReproducedModel, ReproductionSummary
from mlm_repro.experiments.reproduce.plan import SEED_MARK, model_name, twin_rule
from mlm_repro.experiments.reproduce.steps import TASKS, evaluation_name
from mlm_repro.experiments.scores import END, compared, text_score
from mlm_repro.lineage.atomic import parse_json
from mlm_repro.lineage.chain import CHECKPOINTS
from mlm_repro.lineage.derived import Checked, Input, Partly
from mlm_repro.lineage.digest import is_sealed, read_digest
from mlm_repro.lineage.errors import DataMissing
from mlm_repro.lineage.files import Environment, Manifest, parse_document, read_document, read_values
from mlm_repro.lineage.records import RECORDS, Record, read_records
from mlm_repro.lineage.run import MANIFEST
from mlm_repro.lineage.shipped import model_file

CURVE_POINTS = 200
"""Blocks of iterations that a run's metrics are averaged over."""
UNITS_OF_TWINS = ("bits_per_byte", "log_likelihood")
"""Ends of the names of quantities that compare twins; the paper has none of them."""
RESULTS: dict[str, type[PerplexityResult | ClozeResult]] = dict(
    zip(TASKS, (PerplexityResult, ClozeResult), strict=True)
)
FORMER_EXAMPLES = "examples.jsonl"
"""Answers that the first release kept beside its evaluations."""


def keep_training(training: Path) -> KeptRun:
    """What a reproduction keeps of a training: of its metrics the validations, and means of blocks of iterations.

    Losses, rates and norms are means over the block that ends at `iteration`; tokens/s and TFLOP/s are those of the
    whole block's work in the whole block's time.
    """
    steps = read_steps(training)
    block = max(len(steps) // CURVE_POINTS, 1)
    lines: list[Step | Validation] = [_mean(steps[start : start + block]) for start in range(0, len(steps), block)]
    lines += read_validations(training)
    lines.sort(key=lambda line: line.iteration)
    name = model_name(read_document(training / MANIFEST, Manifest).name)
    return KeptRun.of(training, name=name, metrics=[line.to_json() for line in lines])


def _mean(steps: Sequence[Step]) -> Step:
    norms = [step.gradient_norm for step in steps if step.gradient_norm is not None]
    return Step(
        kind="train", iteration=steps[-1].iteration, loss=fmean(step.loss for step in steps),
        learning_rate=fmean(step.learning_rate for step in steps), gradient_norm=fmean(norms) if norms else None,
        loss_scale=fmean(step.loss_scale for step in steps), seconds=fmean(step.seconds for step in steps),
        tokens_per_second=harmonic_mean([step.tokens_per_second for step in steps]),
        model_tflops=harmonic_mean([step.model_tflops for step in steps]),
    )  # fmt: skip


class Derivation:
    """Summary, scores and records of a reproduction, by its manifest, data card, kept trainings and evaluations."""

    def __init__(self, run: Path, said: ReproductionSummary, trainings: Mapping[str, KeptRun] | None = None) -> None:
        """`said` has the reason and the commands, which follow from nothing, and models of the first release.

        `trainings` by name stand for those that the reproduction keeps.
        """
        self._run, self._said, self._manifest = run, said, read_document(run / MANIFEST, Manifest)
        self.trainings = read_runs(run) if trainings is None else trainings

    @cached_property
    def summary(self) -> ReproductionSummary:
        """The summary: the models in the order in which they were trained."""
        started, target = self._manifest.environment, self._manifest.config["target"]
        rules = [twin_rule(recipe(manifest)) for line in self.trainings.values() if (manifest := manifest_of(line))]
        return ReproductionSummary(
            target=target, mode="full" if self._manifest.config["mode"] == "full" else "scaled",
            reason=self._said.reason, source=read_document(self._run / DATASET, DataCard).source,
            twin_rule=rules[0] if rules else self._said.twin_rule, hardware=_hardware(started),
            models=[self._model(name) for name in sorted(self.trainings, key=_order)],
            commit=str(started.source.get("commit") or ""), commands=self._said.commands,
        )  # fmt: skip

    def _model(self, name: str) -> ReproducedModel:
        training, published = self.trainings[name], shape_of(read_run_config(model_file(name.partition(SEED_MARK)[0])))
        if (manifest := manifest_of(training)) is None:
            said = next(model for model in self._said.models if model.name == name)
            return said.model_copy(update={"published": published})
        done = parse_document(training.summary, TrainingSummary, f"{SUMMARY} of {name}")
        return ReproducedModel(
            name=name, run=f"{manifest.name}-{manifest.identity[:8]}", published=published,
            trained=shape_of(recipe(manifest)), seed=done.seed, tokens=done.tokens, train_seconds=done.train_seconds,
            tokens_per_second=done.tokens_per_second,
            checkpoint_digest=read_evaluations(self._run)[evaluation_name(name, TASKS[0])]["checkpoint_digest"],
        )  # fmt: skip

    @cached_property
    def results(self) -> dict[str, PerplexityResult | ClozeResult]:
        """The results of its models, by model and protocol.

        Raises IntegrityFailure for one that is not there, or that is not what its protocol gives.
        """
        kept, results = read_evaluations(self._run), {}
        for model in self.summary.models:
            for task, of in RESULTS.items():
                name = evaluation_name(model.name, task)
                results[name] = parse_document(kept.get(name), of, f"{name} in {EVALUATIONS}")
        return results

    @property
    def scores(self) -> ReproductionScores:
        """Paired differences between neighbouring models."""
        by_size: dict[str, list[TextScore]] = {}
        for model in self.summary.models:
            result = self.results[evaluation_name(model.name, TASKS[0])]
            assert isinstance(result, PerplexityResult)
            by_size.setdefault(model.series, []).append(text_score(result))
        scores = [*by_size.values()]
        articles = len(scores[0][0].nll)
        larger = range(1, len(scores)) if articles > 1 else ()
        comparisons = [compared(result.task, place - 1, place, scores) for place in larger]
        return ReproductionScores(
            text=result.task, articles=articles, seeds=len(scores[0]), models=[*by_size], comparisons=comparisons
        )

    @property
    def records(self) -> list[Record]:
        """Every record. The first release, which has no scores, has neither bits per byte nor log-likelihoods."""
        summary = self.summary
        records = list(published_records(tuple(dict.fromkeys(model.series for model in summary.models))))
        for model in summary.models:
            digest = self._manifest.parents[model.run.rpartition("-")[0]]
            records += _curve_records(model, summary.mode, digest, self.trainings[model.name])
            for task in RESULTS:
                records += _evaluation_records(model, self.results[evaluation_name(model.name, task)])
        if not (self._run / SCORES).is_file():
            return [record for record in records if not record.quantity.endswith(UNITS_OF_TWINS)]
        return [*records, *_bands(records, self._manifest)]


def manifest_of(training: KeptRun) -> Manifest | None:
    """The manifest of a kept training; the first release kept none."""
    return parse_document(training.manifest, Manifest, f"{MANIFEST} of {training.name}") if training.manifest else None


def _order(name: str) -> tuple[int, int]:
    """Key by which models stand in the order of their trainings: all sizes with one seed, then with the next."""
    series, _, seed = name.partition(SEED_MARK)
    return int(seed or 0), LADDER.index(series)


def _bands(records: list[Record], manifest: Manifest) -> Iterator[Record]:
    """The mean of a model's results over several seeds, with minimum and maximum."""
    of_seeds: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.seed is not None and record.quantity.endswith((*UNITS_OF_TWINS, END)):
            of_seeds.setdefault((record.series, record.quantity), []).append(record)
    for same in of_seeds.values():
        if len(same) > 1:
            values = [record.value for record in same]
            note = f"mean of {len(same)} seeds, {min(values):.5g} to {max(values):.5g}"
            yield same[0].model_copy(update={**origin_of(manifest), "value": fmean(values), "seed": None, "note": note})


def _evaluation_records(model: ReproducedModel, result: PerplexityResult | ClozeResult) -> Iterator[Record]:
    numbers: dict[str, tuple[float | None, str]]
    if isinstance(result, ClozeResult):
        numbers = {"accuracy": (result.accuracy * 100, "%"), "log_likelihood": (-math.log(result.perplexity), "nats")}
        scored = f"{result.num_examples:,} examples"
    else:
        numbers = {"perplexity": (result.perplexity, ""), "bits_per_byte": (result.bits_per_byte, "")}
        scored = f"{result.num_scored_tokens:,} tokens"
    text = result.task.removesuffix("-perplexity").replace("-", "_")
    for name, (value, unit) in numbers.items():
        assert value is not None  # a held-out text has words
        yield Record(
            experiment="2019/table-3", series=model.series, quantity=f"{text}_{name}", value=value, unit=unit,
            kind=result.kind, source=model.run, digest=result.checkpoint_digest, seed=model.seed,
            note=f"partial: {scored} scored" if result.partial else "",
        )  # fmt: skip


def _curve_records(model: ReproducedModel, mode: str, digest: str, training: KeptRun) -> list[Record]:
    origin: dict[str, Any] = {
        "series": model.series, "kind": "scaled" if mode == "scaled" else "measured", "source": model.run,
        "digest": digest, "seed": model.seed, "x_name": "iteration",
    }  # fmt: skip
    means = steps_in(training.metrics)
    block = means[0].iteration if means else 1
    records = [
        Record(
            experiment="2019/training-loss", quantity="training_loss", value=mean.loss, x=mean.iteration,
            note=f"mean of {block} iterations" if block > 1 else "", **origin,
        )
        for mean in means
        if mean.iteration % block == 0
    ]  # fmt: skip
    places = {"validation": ("2019/figure-6", "validation_perplexity"), "final-validation": ("2019/validation", END)}
    for validation in validations_in(training.metrics):
        if validation.iteration:
            experiment, quantity = places[validation.kind]
            value, x = validation.perplexity, validation.iteration
            records.append(Record(experiment=experiment, quantity=quantity, value=value, x=x, **origin))
    return records


def _hardware(started: Environment) -> str:
    """Processor, cores, memory and GPUs."""
    memory = f", {started.memory_bytes / 2**30:.0f} GiB" if started.memory_bytes else ""
    gpus = f"; {', '.join(started.gpus)}" if started.gpus else ""
    return f"{started.cpu}, {started.cores} cores{memory}{gpus}"


def shape_of(config: RunConfig) -> ModelShape:
    """Shape, size and length of training of a recipe's model."""
    values = config.model.model_dump() | config.train.model_dump() | {"parameters": parameter_count(config.model)}
    return ModelShape.model_validate(values)


# -- what verification compares ------------------------------------------------------------------------------------


class _Found:
    """A reproduction with its trainings and datasets, as far as they are here."""

    def __init__(self, run: Path) -> None:
        said, kept = read_document(run / SUMMARY, ReproductionSummary), read_runs(run)
        self.places = {model.name: run.parent / model.run for model in said.models}
        self.here = {name: place for name, place in self.places.items() if is_sealed(place)}
        again = {name: keep_training(place) for name, place in self.here.items()}
        self.said, self.made = said, Derivation(run, said, kept | again)
        trained_on = (dataset for place in self.here.values() for dataset in named_datasets(place))
        self.datasets = [dataset.place for dataset in trained_on if dataset.is_here]


def inputs(run: Checked) -> Iterator[Input]:
    """Its trainings."""
    for place in _Found(run.path).places.values():
        yield Input(place.name.rpartition("-")[0], place, read_digest(place) if is_sealed(place) else "")


def runs(run: Checked) -> Iterator[tuple[str, Any, Any]]:
    """The kept trainings, by those that are here; the manifest's inputs, and the summary, by all of these."""
    found, target = _Found(run.path), run.manifest.config["target"]
    yield from kept_trainings(run, found.places, keep_training)
    summary, said = found.made.summary, run.manifest.parents
    due = {"dataset": said.get("dataset")}
    for model in summary.models:
        training, name = found.made.trainings[model.name], model.run.rpartition("-")[0]
        due[name] = training.seal["digest"] if training.seal else said.get(name)
        if manifest := manifest_of(training):
            due["dataset"] = manifest.parents["dataset"]
        if summary.mode == "full":  # the published model, but for what its text decides
            shape = Partly(model.published.model_dump(exclude={"vocab_size", "parameters"}))
            yield f"{SUMMARY}: {model.name}, called the published model", model.trained, shape
    yield f"{MANIFEST}: parents", said, due
    yield SUMMARY, found.said, summary
    models = [*dict.fromkeys(model.series for model in summary.models)]
    yield f"{SUMMARY}: models", models, [*LADDER[: LADDER.index(target) + 1]]
    commands = summary.commands
    yield (
        f"{SUMMARY}: commands",
        commands,
        {name: each if target in each else target for name, each in commands.items()},
    )


def evaluations(run: Checked) -> Iterator[tuple[str, Any, Any]]:
    """The evaluations, by their sums and texts, and by the models and the tokenizer of the reproduction."""
    found, tokenizer = _Found(run.path), read_document(run.path / DATASET, DataCard).tokenizer.digest
    due = {}
    for model in found.said.models:
        here = found.here.get(model.name)
        checkpoint = (
            read_digest(here / CHECKPOINTS / read_summary(here).checkpoint) if here else model.checkpoint_digest
        )
        for protocol in RESULTS:
            result = found.made.results[name := evaluation_name(model.name, protocol)]
            facts = {
                "kind": "scaled" if found.said.mode == "scaled" else "measured", "tokenizer_digest": tokenizer,
                "checkpoint": f"{model.run}/{result.checkpoint.partition('/')[2]}", "checkpoint_digest": checkpoint,
                "partial": "; only " in result.protocol,
            }  # fmt: skip
            due[name] = result.to_json() | follows(result, _task(run, found, model, protocol, result)) | facts
            if isinstance(result, ClozeResult) and not result.examples:
                due[name]["num_correct"] = _right_answers(run, model, result)
    yield EVALUATIONS, read_evaluations(run.path), due


def _task(
    run: Checked, found: _Found, model: ReproducedModel, protocol: str, result: PerplexityResult | ClozeResult
) -> Task | None:
    """The task of an evaluation, if its text and tokenizer are here."""
    limit = run.manifest.config["examples" if isinstance(result, ClozeResult) else "windows"]
    try:
        if not found.datasets:
            raise DataMissing("text and tokenizer")
        manifest = read_document(found.here[model.name] / MANIFEST, Manifest)
        return task_of(protocol, result, found.datasets[0], recipe(manifest).model.seq_length, limit)
    except DataMissing as missing:
        run.absent.append(f"{missing} of {evaluation_name(model.name, protocol)}")
        return None


def _right_answers(run: Checked, model: ReproducedModel, result: ClozeResult) -> int:
    """The number of right answers nearest to the stated one that the kept answers allow."""
    path = run.path / FORMER_EXAMPLES
    about, *shown = [parse_json(line) for line in path.read_bytes().splitlines()] if path.is_file() else [{}]
    right = [example["correct"][about["models"].index(model.name)] for example in shown]
    if len(right) < result.num_examples:
        run.absent.append(f"answers of {model.name}")
    return min(max(result.num_correct, sum(right)), result.num_examples - right.count(False))


def numbers(run: Checked) -> Iterator[tuple[str, Any, Any]]:
    """Scores and records, by all of these; claims may be worded differently by now."""
    made = _Found(run.path).made
    if (run.path / SCORES).is_file():
        yield SCORES, read_values(run.path / SCORES), made.scores
    yield RECORDS, _in_order(read_records(run.path / RECORDS)), _in_order(made.records)


def _in_order(records: Iterable[Record]) -> list[Record]:
    """Sort the published records and drop their words; the other records follow in their order."""
    published = [record for record in records if record.kind == "published"]
    bare = [record.model_copy(update={"source": "", "note": ""}) for record in published]
    return [*sorted(bare, key=Record.model_dump_json), *(record for record in records if record.kind != "published")]


def data(run: Checked) -> Iterator[tuple[str, Any, Any]]:
    """The data card and the ledger, by the dataset; if that is not here, by each other."""
    made = {DATASET: card_by_ledger(run.path), LEDGER: ledger_by_itself(read_document(run.path / LEDGER, Ledger))}
    for place in _Found(run.path).datasets[:1]:
        made = {name: read_values(place / name) for name in made}
    for name, due in made.items():
        yield name, read_values(run.path / name), due
