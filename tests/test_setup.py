"""The set-up without what it needs: one sentence with the remedy, and the same command goes on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.rooms import ROOT


def set_up(folder: Path, python: str, programs: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """`install.sh` with an interpreter and shell scripts in the place of some programs."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PIP_INDEX_URL": "file:///nowhere"}
    command = ["sh", "install.sh", python, str(folder / "venv"), "cuda"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("python", "programs", "words"),
    [
        ("python9", {}, "there is no python9 here; name a Python"),
        ("older", {"older": "exit 1"}, "Python 3.11 or newer is needed; name one with: make setup PYTHON="),
        (sys.executable, {"df": "echo; echo a b c 1000"}, "needs 4 GB of disk: make room"),
    ],
)
def test_what_is_missing_is_named_with_its_remedy(
    tmp_path: Path, python: str, programs: dict[str, str], words: str
) -> None:
    done = set_up(tmp_path, python, programs)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert not (tmp_path / "venv").exists()


def test_without_a_network_the_remedy_is_the_last_line_and_an_old_environment_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").write_text("of another machine")
    done = set_up(tmp_path, sys.executable, {})
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("with PyPI in reach the same command goes on")
    found = subprocess.run(
        [tmp_path / "venv" / "bin" / "python", "--version"], capture_output=True, text=True, check=True
    )
    assert found.stdout
