"""Sealed runs of the catalogue's experiments, made once, and ways to spoil a copy of one."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from mlm_repro.experiments.catalogue import load_experiments
from mlm_repro.lineage.digest import MARKER, seal
from tests.experiments.simulated import seal_simulated


def write_runs(folder: Path, names: Iterable[str] | None = None) -> list[Path]:
    """Seal what follows for the named experiments, or for all with workloads, into a folder."""
    chosen = [one for one in load_experiments().values() if one.parts]
    return [
        seal_simulated(one, folder).path for one in chosen if names is None or one.name in names
    ]


def spoil(run: Path, folder: Path, how: str) -> Path:
    """A copy of a run that is `unfinished`, `empty`, `changed`, `corrupted` (and sealed so) or
    `unproven`."""
    copy = Path(shutil.copytree(run, folder / run.name))
    records = copy / "records.jsonl"
    lines = records.read_text(encoding="utf-8").splitlines(keepends=True)
    (copy / MARKER).unlink()
    match how:
        case "unfinished":
            return copy
        case "empty":
            records.write_text("")
        case "changed":
            seal(copy)
            records.write_text("".join(lines[1:]))
            return copy
        case "corrupted":
            records.write_text(lines[0][:40] + "\n" + "".join(lines[1:]))
        case "unproven":
            records.write_text(
                json.dumps(json.loads(lines[0]) | {"digest": None}) + "\n" + "".join(lines[1:])
            )
    seal(copy)
    return copy
