"""Files of a sealed reproduction, its data and its training, unpacked."""

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlm_repro.engine.run.files import METRICS, SUMMARY, read_metrics
from mlm_repro.experiments.files import (
    KeptRun,
    join_evaluations,
    read_evaluations,
    write_runs,
)
from mlm_repro.lineage.atomic import json_bytes
from mlm_repro.lineage.digest import MARKER, seal
from mlm_repro.lineage.files import read_object
from mlm_repro.lineage.run import MANIFEST

PACKED = Path(__file__).with_name("sealed_at_ba375c5.tar.gz")
REPRODUCTION, TRAINING, DATASET = "reproduce-355m-*", "355m-tiny-*", "tiny-*"
"""Names of the runs in it."""


def unpack(folder: Path) -> Path:
    """Put the folder of runs into the folder."""
    with tarfile.open(PACKED) as archive:
        archive.extractall(folder, filter="data")
    return folder


def packed(pattern: str) -> Callable[[Path], Path]:
    """What unpacks it and returns the file that fits the pattern."""

    def prepare(folder: Path) -> Path:
        (path,) = unpack(folder).glob(f"runs/{pattern}")
        return path

    return prepare


def join(run: Path) -> None:
    """Put what a run of the first release keeps in folders into the lines of today, byte for byte,
    and seal it anew."""
    kept = []
    for folder in sorted((run / "training").iterdir()):
        line: dict[str, Any] = {"name": folder.name}
        places = {path.name.removeprefix("training-"): path for path in folder.iterdir()}
        files = {
            "manifest": MANIFEST,
            "seal": MARKER,
            "summary": SUMMARY,
            "timeline": "timeline.json",
        }
        for field, file in files.items():
            if path := places.pop(file, None):
                line[field] = read_object(path)
                written = (
                    json_bytes(line[field])
                    if field != "timeline"
                    else json.dumps(line[field]).encode()
                )
                assert written.strip() == path.read_bytes().strip()
        assert places.keys() == {METRICS}
        line["metrics"] = read_metrics(folder)
        texts = [json.dumps(one, ensure_ascii=False) + "\n" for one in line["metrics"]]
        assert "".join(texts) == (folder / METRICS).read_text(encoding="utf-8")
        kept.append(KeptRun.model_validate(line))
    write_runs(run, kept)
    shutil.rmtree(run / "training")
    if (run / "evaluations").is_dir():
        before = {path.stem: path.read_bytes() for path in (run / "evaluations").iterdir()}
        join_evaluations(run)
        assert {
            name: json_bytes(result) for name, result in read_evaluations(run).items()
        } == before
    seal(run)
