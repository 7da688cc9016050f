"""Digests of everything that a change of structure must not move, read from files alone."""

import csv
import hashlib
import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.architecture.rooms import ROOT

TIMED = {
    "seconds",
    "environment",
    "checkpoint_digest",
    "source",
    "digest",
    "train_seconds",
    "tokens_per_second",
    "model_tflops",
    "created",
    "warning",
}
"""Fields that say when, where and how fast, and digests of files that have such fields."""
UNREPEATABLE = {"2021-figure-2"}
"""Tables of the page that hold measured times."""
KEPT = ("--results", ROOT / "results", "--results", ROOT / "results" / "ablations")
COMMANDS = {
    "compare": ("mlm-experiment", "compare", "--all", "--rows", *KEPT),
    "plan": ("mlm-experiment", "plan", "8.3b", "--cluster", "dgx-2h-v100", "--gpus", "512"),
}
"""Commands whose whole output is a function of the source."""


def of_commands(programs: Path, folder: Path) -> dict[str, str]:
    """Digests of what shipped commands print, and of the simulator's predictions of the shipped
    rows."""
    digests = {
        name: of_text(
            subprocess.run(
                [programs / program, *rest], cwd=folder, capture_output=True, text=True
            ).stdout
        )
        for name, (program, *rest) in COMMANDS.items()
    }
    predictions = folder / "predictions.csv"
    subprocess.run(
        [programs / "mlm-experiment", "simulate", "ptd-p-runs", "--out", predictions],
        cwd=folder,
        capture_output=True,
        check=True,
    )
    return digests | {"simulate": of_text(predictions.read_text(encoding="utf-8"))}


def of_kept() -> dict[str, str]:
    """Each sealed folder of results/ by the digest of its seal."""
    return {
        str(seal.parent.relative_to(ROOT)): sha256(seal.read_bytes())
        for seal in (ROOT / "results").rglob("COMPLETE")
    }


def of_reproduction(runs: Path) -> dict[str, str]:
    """Datasets, weights with optimizer state, losses, scores, records and tables of the
    reproductions below `runs`."""
    digests = {}
    for seal in sorted(runs.glob("*/COMPLETE")):
        folder = seal.parent
        if folder.is_symlink():
            continue
        name = folder.name.rpartition("-")[0]
        tokens = [*folder.glob("*.bin"), *folder.glob("*.idx"), *folder.glob("tokenizer/*")]
        weights = sorted(folder.glob("checkpoints/*/*.safetensors"))
        if tokens:
            digests[f"data {name}"] = of_files(folder, tokens)
        if weights:
            digests[f"weights {name}"] = of_files(folder, weights)
            digests[f"losses {name}"] = of_json(map(timeless, read_lines(folder / "metrics.jsonl")))
        if (folder / "records.jsonl").exists():
            digests[f"records {name}"] = of_json(
                map(timeless, read_lines(folder / "records.jsonl"))
            )
            for study in (path for path in folder.glob("experiments-*") if path.is_dir()):
                digests |= of_study(study)
            for line in read_lines(folder / "evaluations.jsonl"):
                digests[f"scores {name} {line['name']}"] = of_json([timeless(line["result"])])
        for path in sorted(folder.glob("report/figures/*.csv")):
            if path.stem not in UNREPEATABLE:
                with path.open(encoding="utf-8", newline="") as file:
                    digests[f"table {path.stem}"] = of_json(map(timeless, csv.DictReader(file)))
    return digests


def of_study(folder: Path) -> dict[str, str]:
    """Records of each run that a study of experiments keeps."""
    records: dict[str, list[Any]] = {
        line["name"].rpartition("-")[0]: [] for line in read_lines(folder / "runs.jsonl")
    }
    for record in read_lines(folder / "records.jsonl"):
        records[record["source"].rpartition("-")[0]].append(timeless(record))
    return {f"records {name}": of_json(lines) for name, lines in records.items()}


def timeless(value: Any) -> Any:
    """The value without its timed fields, at any depth; digests in texts and names of runs are left
    out."""
    if isinstance(value, dict):
        return {name: timeless(inner) for name, inner in value.items() if name not in TIMED}
    if isinstance(value, str):
        return re.sub(r"-[0-9a-f]{8}\b|\b[0-9a-f]{64}\b", "", value)
    return [timeless(inner) for inner in value] if isinstance(value, list) else value


def read_lines(path: Path) -> list[Any]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def of_text(text: str) -> str:
    """The digest of a text with its numbers rounded to nine digits, which processors agree on."""
    return sha256(
        re.sub(r"\d+\.\d{6,}(e-?\d+)?", lambda number: f"{float(number[0]):.9g}", text).encode()
    )


def of_files(folder: Path, paths: Iterable[Path]) -> str:
    """One digest of the files' names below `folder` and their bytes."""
    return of_json(
        (str(path.relative_to(folder)), sha256(path.read_bytes())) for path in sorted(paths)
    )


def of_json(values: Iterable[Any]) -> str:
    """One digest of values that JSON can hold."""
    return sha256(json.dumps(list(values), sort_keys=True).encode())


def sha256(content: bytes) -> str:
    """Hexadecimal SHA-256."""
    return hashlib.sha256(content).hexdigest()
