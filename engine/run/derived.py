"""What the files of a training follow from: its configuration, its schedule and its metrics. Imports no torch."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from mlm_repro.data_pipeline.files import dataset_digest, named_datasets
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.costs import parameter_count, tokens_trained
from mlm_repro.engine.data.batch_schedule import BatchSchedule
from mlm_repro.engine.optim.schedule import learning_rate
from mlm_repro.engine.run.files import METRICS, SUMMARY, TrainingSummary, read_metrics, read_summary, validations_in
from mlm_repro.lineage.config import parse_config
from mlm_repro.lineage.derived import Checked, Input, Partly
from mlm_repro.lineage.digest import is_sealed
from mlm_repro.lineage.files import Manifest


def inputs(run: Checked) -> Iterator[Input]:
    """The datasets that it was trained on."""
    for dataset in named_datasets(run.path):
        digest = dataset_digest(dataset.place) if is_sealed(dataset.place) else ""
        yield Input(dataset.parent, dataset.place, digest)


def recipe(manifest: Manifest) -> RunConfig:
    """The configuration of a training. Raises BadInput for one that is of nothing."""
    return parse_config(manifest.config, RunConfig, f"{manifest.name}/manifest.json")


def files(run: Checked) -> Iterator[tuple[str, Any, Any]]:
    """The summary, by configuration and metrics; the metrics, by the schedule of batches and rates."""
    if is_sealed(run.path):
        said, lines, config = read_summary(run.path), read_metrics(run.path), recipe(run.manifest)
        yield SUMMARY, said, Partly(summary_of(config, said) | ending_of(lines))
        yield METRICS, lines, lines_of(lines, config, is_first=set(run.manifest.parents) == {"dataset"})


def summary_of(config: RunConfig, said: TrainingSummary) -> Partly:
    """What a summary says by the training's configuration, and of its time by tokens and rate."""
    seconds, train = said.tokens / said.tokens_per_second, config.train
    is_near = abs(seconds - said.train_seconds) <= 0.01 + 0.001 * said.train_seconds
    return Partly(
        iterations=train.iterations,
        tokens=tokens_trained(config.model, train),
        parameters=parameter_count(config.model),
        seed=said.seed and train.seed,
        train_seconds=said.train_seconds if is_near else seconds,
    )


def ending_of(metrics: Sequence[dict[str, Any]]) -> Partly:
    """What a summary says of the last validation."""
    last = next(reversed(validations_in(metrics)), None)
    return Partly(validation_loss=last and last.loss, validation_perplexity=last and last.perplexity)


def lines_of(metrics: Sequence[dict[str, Any]], config: RunConfig, is_first: bool) -> list[Partly]:
    """What the lines of metrics say by the schedule: every iteration stands there once and in order.

    The updates of a training that goes on from another one are counted from an unknown number.
    """
    train, schedule = config.train, BatchSchedule(config.train)
    made, done, updates = [], 0, 0
    for line in metrics:
        if line["kind"] != "train":
            made.append(Partly(iteration=done, perplexity=perplexity_of(line)))
            continue
        due = Partly(iteration=(done := done + 1))
        if "samples" in line:
            due["samples"] = schedule.samples_before(done)
            due |= {"learning_rate": learning_rate(train, updates + 1)} if is_first else {}
            updates += not line.get("skipped")
        made.append(due)
    return [*made, *(Partly(iteration=number) for number in range(done + 1, train.iterations + 1))]


def perplexity_of(validation: dict[str, Any]) -> float:
    """The perplexity of a line of metrics, by its loss."""
    return math.exp(min(validation["loss"], 20))
