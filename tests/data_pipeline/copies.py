"""Copies of the package and of libraries, to be changed, and commands that run with them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from tests.architecture.rooms import PACKAGE, ROOT

MAIN = f"from {PACKAGE}.data_pipeline.cli import main; main()"


def copy_of_package(folder: Path) -> Path:
    """A copy of all that `mlm-data` needs."""
    for room in ("lineage", "data_pipeline"):
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "sources").mkdir()
    (folder / "sources" / PACKAGE).symlink_to(folder)
    return folder


def change(path: Path, old: str, new: str) -> None:
    """Replace the one place where a file has the text `old`."""
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{path} has {old!r} {text.count(old)} times"
    path.write_text(text.replace(old, new), encoding="utf-8")


def copy_of_library(name: str, folder: Path, number: str = "") -> Path:
    """A folder for the path with a copy of an installed library, under another version's number if
    one is given."""
    spec = find_spec(name)
    assert spec
    assert spec.origin
    shutil.copytree(
        Path(spec.origin).parent, folder / name, ignore=shutil.ignore_patterns("__pycache__")
    )
    if number:
        about = folder / f"{name}-{number}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n", encoding="utf-8"
        )
    return folder


def start(*words: object, folder: Path, places: Iterable[Path] = ()) -> "subprocess.Popen[str]":
    """`mlm-data` in a process of its own, with `places` first on its path."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MLM_DATA_DIR", "PYTHONPATH")
    }
    variables |= {
        "PYTHONPATH": os.pathsep.join(map(str, places)),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-P", "-c", MAIN, *map(str, words)]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def run(*words: object, folder: Path, places: Iterable[Path] = (), ends: int = 0) -> str:
    """Run it to its end, which must have the exit code `ends`: what it said on standard error and
    output."""
    process = start(*words, folder=folder, places=places)
    out, err = process.communicate(timeout=300)
    assert process.returncode == ends, err
    return err + out
