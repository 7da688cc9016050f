"""What is kept of trainings whose result is forecast, and the seeds that a forecast gives. Imports no torch.

A training's seed is a part of the forecast's digest, so that it cannot have been trained before the forecast was
written, and a forecast that is changed later is no longer that of the training.
"""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from engine.config import RunConfig
from engine.data.batch_schedule import BatchSchedule
from engine.run.directory import read_validations
from engine.run.files import METRICS, SUMMARY
from lineage.atomic import write_text
from lineage.config import parse_config
from lineage.digest import MARKER, sha256_file
from lineage.errors import IntegrityFailure
from lineage.files import Manifest, read_document, read_values
from lineage.run import MANIFEST, RunDirectory

FORECAST, TRAINING = "forecast.json", "training"
SEARCH_SEED = 0
"""Of trainings that try a learning rate."""


class Trained(NamedTuple):
    """What is kept of a training."""

    folder: Path
    config: RunConfig
    dataset: str
    """Digest of what it was trained on."""
    digest: str
    losses: dict[int, float]
    """Of the same part of the validation text by tokens trained on, from 0."""
    final: float
    """At the end, of all of the validation text."""
    is_finished: bool
    """Not if its loss stopped being a number."""

    @property
    def is_trial(self) -> bool:
        """Whether it tried a learning rate."""
        return self.config.train.seed == SEARCH_SEED

    @property
    def end(self) -> float:
        """The last validation's loss."""
        return list(self.losses.values())[-1]

    @property
    def is_diverged(self) -> bool:
        """Whether its loss stopped being a number or ended above that of the untrained model."""
        return not self.is_finished or self.end > self.losses[0]


def keep(training: Path, folder: Path) -> None:
    """Put what is kept of a training into `folder`: manifest, marker, summary and validations."""
    place = folder / TRAINING / training.name
    place.mkdir(parents=True, exist_ok=True)
    for name in (MANIFEST, MARKER, SUMMARY):
        if (training / name).is_file():
            shutil.copyfile(training / name, place / f"training-{name}")
    write_text(place / METRICS, "".join(line.to_line() for line in read_validations(training)))


def read_kept(folder: Path) -> list[Trained]:
    """The trainings kept in a folder. Raises IntegrityFailure where one is damaged or is not what its seal says."""
    return [_read(manifest.parent) for manifest in sorted((folder / TRAINING).glob(f"*/training-{MANIFEST}"))]


def _read(folder: Path) -> Trained:
    manifest = read_document(folder / f"training-{MANIFEST}", Manifest)
    config = parse_config(manifest.config, RunConfig, f"{folder.name}/{MANIFEST}")
    marker = folder / f"training-{MARKER}"
    digest = ""
    if marker.is_file():
        sealed = read_values(marker)
        digest = sealed["digest"]
        if sealed["files"][MANIFEST]["sha256"] != sha256_file(folder / f"training-{MANIFEST}"):
            raise IntegrityFailure(f"{folder.name}: the manifest is not the one that was sealed")
    schedule, length = BatchSchedule(config.train), config.model.seq_length
    lines = read_validations(folder)
    losses = {
        schedule.samples_before(line.iteration) * length: line.loss for line in lines if line.kind == "validation"
    }
    if marker.is_file() and max(losses, default=0) != schedule.samples_before(config.train.iterations) * length:
        raise IntegrityFailure(f"{folder.name}: {METRICS} does not end where the training did")
    return Trained(
        folder,
        config,
        manifest.parents["dataset"],
        digest,
        losses,
        lines[-1].loss if lines else math.nan,
        marker.is_file(),
    )


def seeds_of(forecast: Path, count: int) -> list[int]:
    """The seeds of the trainings that a forecast is about: the first `count` words of 32 bits of its SHA-256."""
    digest = sha256_file(forecast)
    return [int(digest[8 * place : 8 * place + 8], 16) for place in range(count)]


def seal_forecast(forecast: Path, about: str, made_of: Mapping[str, str]) -> Path:
    """A sealed run directory of its own for the forecast of a folder, beside that; `about` says what kind that is."""
    folder = forecast.parent
    config = {about: folder.name, "sha256": sha256_file(forecast)}
    sealed = RunDirectory.begin(folder.parent, f"{about}-forecast", "forecast", config, dict(made_of))
    if not sealed.is_complete:
        shutil.copyfile(forecast, sealed.path / FORECAST)
        sealed.complete()
    return sealed.path
