"""Edits of a study's sealed run, each with what is said of it."""

import hashlib
from pathlib import Path

from mlm_repro.experiments.files import FORECAST, KeptRun, read_runs, write_runs
from mlm_repro.lineage.atomic import json_bytes
from mlm_repro.lineage.digest import sha256_json
from mlm_repro.lineage.run import MANIFEST
from tests.data_pipeline.builds import build, config_for
from tests.data_pipeline.conftest import sentences, write_jsonl


def write_forecast_later(run: Path) -> None:
    """The forecast is right in every number, but another one than that whose digest gave the
    seeds."""
    (run / FORECAST).write_bytes((run / FORECAST).read_bytes() + b"\n")


def other_data(run: Path) -> None:
    training = next(iter(read_runs(run).values()))
    assert training.manifest
    training.manifest["parents"]["dataset"] = "0" * 64
    reseal(run, training)


def reseal(run: Path, training: KeptRun) -> None:
    """Keep an edited training in place of the one of its name, with a seal that agrees with its
    manifest."""
    assert training.seal
    files = training.seal["files"]
    files[MANIFEST]["sha256"] = hashlib.sha256(json_bytes(training.manifest)).hexdigest()
    training.seal["digest"] = sha256_json(files)
    write_runs(run, (read_runs(run) | {training.name: training}).values())


def built(folder: Path) -> Path:
    """A dataset that the pipeline built, which may be checked to its leaves."""
    source = write_jsonl(folder / "corpus.jsonl", [sentences(40, seed) for seed in range(200)])
    return build(
        folder,
        config_for(f"jsonl:{source}", "split.train=3", "decontaminate.test_sets=[]"),
        "built",
    )
