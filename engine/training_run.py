"""A training run on disk: finding its directory, reading its files. Imports no torch."""

import json
from pathlib import Path
from typing import Any

from engine.config import RunConfig
from engine.dataset import DatasetFacts
from lineage.errors import IntegrityFailure
from lineage.run import RunDirectory

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"


def begin_run(config: RunConfig, root: Path) -> tuple[RunConfig, DatasetFacts, RunDirectory]:
    """The configuration with its dataset's vocabulary, the dataset, and the directory this work has below `root`."""
    dataset = DatasetFacts.read(config.data.dataset)
    config = config.model_copy(update={"model": dataset.resize(config.model)})
    parents = {"dataset": dataset.digest}
    run = RunDirectory.begin(root, config.name, "training", config.model_dump(mode="json"), parents)
    return config, dataset, run


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, oldest first; a last line cut short by a crash is left out."""
    path = run / METRICS
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(dict(json.loads(text)))
        except ValueError:
            break
    return lines


def read_summary(run: Path) -> dict[str, Any]:
    """What a complete run says of itself."""
    path = run / SUMMARY
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise IntegrityFailure(f"{path} cannot be read: {error}") from error
