"""Files of a sealed reproduction, its data and its training, unpacked."""

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlm_repro.engine.run.files import METRICS, SUMMARY, read_metrics
from mlm_repro.experiments.files import EVALUATIONS, LADDER, KeptRun, LadderScores, join_evaluations, write_runs
from mlm_repro.lineage.atomic import json_bytes
from mlm_repro.lineage.digest import MARKER, seal
from mlm_repro.lineage.files import read_object, write_lines
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
    """Put what a run of the first release keeps in folders into the lines of today, byte for byte, and seal it anew."""
    kept = []
    for folder in sorted((run / "training").iterdir()):
        line: dict[str, Any] = {"name": folder.name}
        for field, file in (("manifest", MANIFEST), ("seal", MARKER), ("summary", SUMMARY)):
            path = next((path for path in (folder / f"training-{file}", folder / file) if path.is_file()), None)
            if path:
                line[field] = read_object(path)
                assert json_bytes(line[field]) == path.read_bytes()
        line["metrics"] = read_metrics(folder)
        texts = [json.dumps(one, ensure_ascii=False) + "\n" for one in line["metrics"]]
        assert "".join(texts) == (folder / METRICS).read_text(encoding="utf-8")
        kept.append(KeptRun.model_validate(line))
    write_runs(run, kept)
    shutil.rmtree(run / "training")
    if (run / LADDER).is_file():
        files = sorted((run / "evaluations").iterdir())
        write_lines(run / EVALUATIONS, (LadderScores(name=path.stem, **read_object(path)) for path in files))
        shutil.rmtree(run / "evaluations")
    elif (run / "evaluations").is_dir():
        join_evaluations(run)
    seal(run)
