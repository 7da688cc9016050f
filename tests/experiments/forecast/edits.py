"""Edits of a study's sealed run, each with what is said of it."""

from pathlib import Path
from typing import Any

from mlm_repro.experiments.files import FORECAST, TRAINING
from mlm_repro.lineage.atomic import write_json
from mlm_repro.lineage.digest import MARKER, sha256_file
from mlm_repro.lineage.files import read_object
from mlm_repro.lineage.run import MANIFEST


def write_forecast_later(run: Path) -> None:
    """The forecast is right in every number, but another one than that whose digest gave the seeds."""
    (run / FORECAST).write_bytes((run / FORECAST).read_bytes() + b"\n")


def other_data(run: Path) -> None:
    training = sorted((run / TRAINING).iterdir())[0]
    manifest = read_object(training / f"training-{MANIFEST}")
    manifest["parents"]["dataset"] = "0" * 64
    reseal(training, manifest)


def reseal(training: Path, manifest: dict[str, Any]) -> None:
    write_json(training / f"training-{MANIFEST}", manifest)
    sealed = read_object(training / f"training-{MARKER}")
    sealed["files"][MANIFEST]["sha256"] = sha256_file(training / f"training-{MANIFEST}")
    write_json(training / f"training-{MARKER}", sealed)
