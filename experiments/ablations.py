"""Small controlled comparisons: the same training but for one thing, over several seeds.

Each is a paper's claim at a size a laptop trains in minutes, defined in its experiment.toml. Every arm of a seed starts
from the same initial values and sees the same tokens in the same order. Torch is imported only where arms train.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from engine.config import RunConfig
from engine.training_run import read_metrics
from experiments.catalogue import Ablation, Arm, Experiment, load_experiments
from experiments.verdicts import RECORDS
from lineage.config import parse_config
from lineage.digest import sha256_json
from lineage.errors import BadInput
from lineage.records import Record, write_records
from lineage.run import RunDirectory

CURVE_POINTS = 20
"""Blocks of iterations that a training loss is averaged over."""


class Trained(NamedTuple):
    """What came of one arm with one seed."""

    arm: str
    seed: int
    run: RunDirectory
    losses: Sequence[float]
    """Of each iteration, as far as it got."""
    validation_loss: float | None
    """At the end; None where the loss stopped being a number."""
    untrained_loss: float

    @property
    def is_diverged(self) -> bool:
        """Whether the loss stopped being a number or ended above that of an untrained model."""
        return self.validation_loss is None or self.validation_loss > self.untrained_loss


def run_ablation(experiment: Experiment, dataset: Path, runs: Path) -> tuple[RunDirectory, list[Record]]:
    """Train every arm with every seed below `runs`; a sealed run of what came of them, with its records.

    Raises BadInput for an experiment without an ablation.
    """
    ablation = ablation_of(experiment)
    found = [
        _train(arm.name, seed, configure(experiment, arm, seed, dataset), runs)
        for seed in ablation.seeds
        for arm in ablation.arms
    ]
    numbers = [line for one in found for line in _numbers(one)]
    config = {"experiment": experiment.model_dump(mode="json"), "mode": "scaled", "numbers": sha256_json(numbers)}
    parents = {one.run.path.name: one.run.digest for one in found if one.run.is_complete}
    run = RunDirectory.begin(runs, f"experiment-{_slug(experiment.name)}", "experiment", config, parents)
    digest = sha256_json(config)
    records = [Record(experiment=experiment.name, source=run.path.name, digest=digest, **line) for line in numbers]
    if run.is_complete:
        run.link()
    else:
        write_records(run.path / RECORDS, records)
        run.complete()
    return run, records


def ablation_of(experiment: Experiment) -> Ablation:
    """Its ablation. Raises BadInput where there is none."""
    if experiment.ablation is None:
        names = ", ".join(one.name for one in load_experiments().values() if one.ablation)
        raise BadInput(f"{experiment.name} has no ablation; there are {names}")
    return experiment.ablation


def configure(experiment: Experiment, arm: Arm, seed: int, dataset: Path) -> RunConfig:
    """One arm's run."""
    ablation = ablation_of(experiment)
    values = {
        "name": f"{_slug(experiment.name)}-{_slug(arm.name)}-{seed}",
        "model": {**ablation.model, **arm.model},
        "train": {**ablation.train, **arm.train, "seed": seed},
        "data": {"dataset": str(dataset)},
    }
    return parse_config(values, RunConfig, f"ablation {experiment.name}")


def format_ablation(experiment: Experiment, records: Sequence[Record]) -> str:
    """The arms' validation losses by seed, as text."""
    ablation = ablation_of(experiment)
    lines = [ablation.question]
    for arm in ablation.arms:
        mine = {one.seed: one for one in records if (one.series, one.quantity) == (arm.name, "validation_loss")}
        shown = (f"{mine[seed].value:.4f}" if seed in mine else "diverged" for seed in ablation.seeds)
        lines.append(f"{arm.name:14} {', '.join(shown)}")
    return "\n".join([*lines, f"validation loss at the end, seeds {', '.join(map(str, ablation.seeds))}"])


def _train(arm: str, seed: int, config: RunConfig, runs: Path) -> Trained:
    from engine.trainer import NotFinite, train
    from engine.training_run import begin_run

    final: float | None = None
    try:
        run = train(config, runs)
        final = read_metrics(run.path)[-1]["loss"]
    except NotFinite:
        run = begin_run(config, runs)[2]
    metrics = read_metrics(run.path)
    losses = [line["loss"] for line in metrics if line["kind"] == "train"]
    is_number = final is not None and math.isfinite(final)
    return Trained(arm, seed, run, losses, final if is_number else None, metrics[0]["loss"])


def _numbers(one: Trained) -> list[dict[str, Any]]:
    """Records of the loss in blocks of iterations, at the end, and whether it diverged."""
    line = {"series": one.arm, "kind": "scaled", "seed": one.seed}
    block = max(len(one.losses) // CURVE_POINTS, 1)
    curve = [
        (start + len(part), fmean(part))
        for start in range(0, len(one.losses), block)
        for part in (one.losses[start : start + block],)
    ]
    found = [
        line | {"quantity": "training_loss", "x": float(x), "x_name": "iteration", "value": value} for x, value in curve
    ]
    if one.validation_loss is not None:
        found.append(line | {"quantity": "validation_loss", "value": one.validation_loss})
    return [*found, line | {"quantity": "diverged", "value": float(one.is_diverged)}]


def _slug(name: str) -> str:
    return re.sub(r"[^\w.]+", "-", name)
