"""A training run on disk: finding its directory, reading its files. Imports no torch."""

from pathlib import Path
from typing import Any

from engine.config import RunConfig
from engine.costs import fullest_rank, parameter_count, tokens_trained
from engine.data.dataset import DatasetFacts
from engine.parallel.layout import Layout
from lineage import VERSION
from lineage.atomic import parse_json
from lineage.config import parse_config
from lineage.environment import list_gpus
from lineage.errors import BadInput, IntegrityFailure
from lineage.files import (
    Memory,
    RankLayout,
    Step,
    TrainingSummary,
    Validation,
    parse_document,
    read_document,
    write_document,
)
from lineage.run import MANIFEST, RunDirectory

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
TIMELINE = "timeline.json"
PLACES = frozenset({"data", "parallel", "record"})
"""Sections of the configuration that say where a run takes place and what it notes down, not what it computes: any
layout continues it."""


def begin_run(config: RunConfig, root: Path) -> tuple[RunConfig, DatasetFacts, RunDirectory]:
    """The configuration with its dataset's vocabulary, the dataset, and the directory this work has below `root`."""
    dataset = DatasetFacts.read(config.data.dataset)
    config = config.model_copy(update={"model": dataset.resize(config.model)})
    described = config.model_dump(mode="json")
    numerics = None
    if config.train.invariant:
        from engine.run.numerics import numerics_identity

        numerics = numerics_identity(on_gpu=bool(list_gpus()))
    run = RunDirectory.begin(root, config.name, "training", described, dataset.parents, PLACES, numerics)
    return config, dataset, run


def read_begun_run(run: RunDirectory) -> RunConfig:
    """The configuration of a run that can be gone on with where it is.

    Raises IntegrityFailure or BadInput when its dataset, its name or the version has changed since it began, because
    the same configuration would now be another run.
    """
    manifest = run.manifest
    config = parse_config(manifest.get("config", {}), RunConfig, str(run.path / MANIFEST))
    try:
        original = f"{manifest['name']}-{manifest['identity'][:8]}"
        began, dataset = manifest["environment"]["mlm_repro"], manifest["parents"]["dataset"]
    except (KeyError, TypeError) as error:
        raise IntegrityFailure(f"{run.path / MANIFEST} does not say what was begun") from error
    if run.path.name != original:
        raise BadInput(f"{run.path} was renamed: it began as {original}")
    if began != VERSION:
        raise BadInput(f"{run.path} began under version {began} and this is {VERSION}: begin a new run")
    if DatasetFacts.read(config.data.dataset).digest != dataset:
        raise IntegrityFailure(f"the dataset {config.data.dataset} has changed since {run.path} began")
    return config


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, oldest first, up to the first that is none; a crash may cut the last short."""
    path = run / METRICS
    if not path.is_file():
        return []
    lines = []
    for text in path.read_bytes().splitlines():
        try:
            line = parse_json(text)
        except ValueError:
            break
        if not isinstance(line, dict) or "kind" not in line or not _is_count(line.get("iteration")):
            break
        lines.append(line)
    return lines


def read_steps(run: Path) -> list[Step]:
    """The iterations in a run's metrics. Raises IntegrityFailure where one is damaged."""
    lines = [line for line in read_metrics(run) if line["kind"] == "train"]
    return [parse_document(line, Step, f"iteration {line['iteration']} in {METRICS}") for line in lines]


def read_validations(run: Path) -> list[Validation]:
    """The validations in a run's metrics, the final one included. Raises IntegrityFailure where one is damaged."""
    lines = [line for line in read_metrics(run) if line["kind"] != "train"]
    return [parse_document(line, Validation, f"a validation in {METRICS}") for line in lines]


def read_summary(run: Path) -> TrainingSummary:
    """What a complete run says of itself."""
    return read_document(run / SUMMARY, TrainingSummary)


def write_summary(
    run: Path, config: RunConfig, layout: Layout, seconds: float, peaks: list[int], measured_by: str, final: Validation,
    checkpoint: str,
) -> None:  # fmt: skip
    """What a run that has come to its end says of itself; `peaks` is memory by rank, `final` the last validation."""
    train, model = config.train, config.model
    closed_form = fullest_rank(model, train, config.parallel, layout.dp).total
    tokens = tokens_trained(model, train)
    summary = TrainingSummary(
        parameters=parameter_count(model),
        iterations=train.iterations,
        tokens=tokens,
        seed=train.seed,
        layout=RankLayout(tp=layout.tp, pp=layout.pp, dp=layout.dp),
        train_seconds=round(seconds, 2),
        tokens_per_second=round(tokens / seconds, 1),
        memory=Memory(closed_form_bytes=closed_form, measured_bytes=peaks, measured_by=measured_by),
        validation_samples=final.samples,
        validation_loss=final.loss,
        validation_perplexity=final.perplexity,
        checkpoint=checkpoint,
    )
    write_document(run / SUMMARY, summary)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0
