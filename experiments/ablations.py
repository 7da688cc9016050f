"""Small controlled comparisons: the same training but for one thing, over several seeds.

Each is the neighbours' claim at a size a laptop trains in minutes. Every arm of a seed starts from the same initial
values and sees the same tokens in the same order.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from engine.config import RunConfig
from engine.training_run import read_metrics
from lineage.atomic import write_json
from lineage.config import parse_config
from lineage.environment import describe_environment
from lineage.errors import BadInput


@dataclass(frozen=True)
class Ablation:
    """Arms that differ in a few settings."""

    question: str
    model: Mapping[str, Any]
    train: Mapping[str, Any]
    arms: Mapping[str, Mapping[str, Mapping[str, Any]]]
    """By name, what differs, by section of the configuration."""
    seeds: tuple[int, ...] = (1, 2)


SMALL_XL = {
    "family": "transformer-xl", "num_layers": 2, "hidden_size": 64, "num_heads": 4, "seq_length": 32, "dropout": 0.0,
    "transformer_xl": {"memory_length": 32},
}  # fmt: skip
RECIPE = {
    "precision": "fp32", "validation_interval": 10_000, "validation_samples": 16, "checkpoint_interval": 10_000,
    "weight_decay": 0.0, "decay": "cosine",
}  # fmt: skip

ABLATIONS = {
    "memory": Ablation(
        "Does a memory of the segment before lower the validation loss at equal parameters, data and steps?",
        SMALL_XL,
        RECIPE | {"iterations": 300, "global_batch_size": 16, "microbatch_size": 16, "learning_rate": 3e-3,
                  "min_learning_rate": 1e-4, "warmup_iterations": 20},
        {"memory 32": {}, "no memory": {"model": {"transformer_xl": {"memory_length": 0}}}},
    ),
    "large-batch": Ablation(
        "Does LAMB train, without warm-up, at a batch and a learning rate where Adam diverges?",
        SMALL_XL,
        RECIPE | {"iterations": 40, "global_batch_size": 96, "microbatch_size": 96, "learning_rate": 0.03,
                  "min_learning_rate": 0.03, "warmup_iterations": 0, "adam_epsilon": 1e-6},
        {"lamb-clamped": {"train": {"optimizer": "lamb-clamped"}}, "lamb": {"train": {"optimizer": "lamb"}},
         "adam": {"train": {"optimizer": "adam"}}},
    ),
}  # fmt: skip


def configure(name: str, arm: str, seed: int, dataset: Path) -> RunConfig:
    """One arm's run."""
    ablation = ABLATIONS[name]
    changed = ablation.arms[arm]
    values = {
        "name": f"{name}-{arm.replace(' ', '-')}-{seed}",
        "model": {**ablation.model, **changed.get("model", {})},
        "train": {**ablation.train, **changed.get("train", {}), "seed": seed},
        "data": {"dataset": str(dataset)},
    }
    return parse_config(values, RunConfig, f"ablation {name}")


def run_ablation(name: str, dataset: Path, runs: Path, out: Path) -> dict[str, Any]:
    """Train every arm with every seed in run directories below `runs` and write what came of them to `out`.

    A run has diverged when its loss stopped being a number or ended above that of an untrained model. Raises BadInput
    for an unknown name.
    """
    if name not in ABLATIONS:
        raise BadInput(f"there is no ablation {name!r}; there are {', '.join(ABLATIONS)}")
    ablation = ABLATIONS[name]
    arms = {arm: [_run(configure(name, arm, seed, dataset), runs) for seed in ablation.seeds] for arm in ablation.arms}
    result = {
        "ablation": name,
        "question": ablation.question,
        "kind": "scaled",
        "command": f"mlm-experiment ablate {name} --dataset {dataset.name}",
        "seeds": list(ablation.seeds),
        "model": dict(ablation.model),
        "train": dict(ablation.train),
        "arms": {
            arm: {
                "changed": {section: dict(values) for section, values in ablation.arms[arm].items()},
                "diverged": [run["diverged"] for run in found],
                "validation_loss": [run["validation_loss"] for run in found],
                "mean_validation_loss": _mean([run["validation_loss"] for run in found]),
                "untrained_loss": [run["untrained_loss"] for run in found],
                "runs": [run["run"] for run in found],
            }
            for arm, found in arms.items()
        },
        "environment": describe_environment(),
    }
    write_json(out, result)
    return result


def _mean(losses: list[float | None]) -> float | None:
    finite = [loss for loss in losses if loss is not None]
    return fmean(finite) if len(finite) == len(losses) else None


def _run(config: RunConfig, runs: Path) -> dict[str, Any]:
    from engine.trainer import NotFinite, train
    from engine.training_run import begin_run

    final: float | None = None
    try:
        path = train(config, runs).path
        final = read_metrics(path)[-1]["loss"]
    except NotFinite:
        path = begin_run(config, runs)[2].path
    untrained = read_metrics(path)[0]["loss"]
    diverged = final is None or not math.isfinite(final) or final > untrained
    return {"run": path.name, "diverged": diverged, "validation_loss": final, "untrained_loss": untrained}


def format_ablation(result: Mapping[str, Any]) -> str:
    """The arms' validation losses by seed, as text."""
    lines = [str(result["question"])]
    for arm, found in result["arms"].items():
        losses = zip(found["validation_loss"], found["diverged"], strict=True)
        shown = ", ".join(("-" if loss is None else f"{loss:.4f}") + " diverged" * lost for loss, lost in losses)
        lines.append(f"{arm:14} {shown}")
    return "\n".join([*lines, f"seeds {', '.join(map(str, result['seeds']))}; validation loss at the end"])
