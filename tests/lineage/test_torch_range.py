"""A torch that does not fit: one sentence and exit code 2 from what needs it, and nothing from what does not."""

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lineage.torch_range import TORCH_RANGE, UnfitTorch, check_torch
from tests.architecture.rooms import ROOT, command_names

CONFIG = "experiments/models/355m.toml"
START = (
    "import importlib, sys; module, name = sys.argv.pop(1).split(':'); getattr(importlib.import_module(module), name)()"
)

NEED_TORCH = [
    ["mlm-train", CONFIG, "--twin", "--ranks", "2"],
    ["mlm-eval", "lambada", "--ckpt", "checkpoint"],
    ["mlm-experiment", "reproduce", "355m", "--smoke"],
    ["mlm-experiment", "preflight", "--quiet"],
    ["mlm-verify", "parallel", CONFIG, "--twin", "--ranks", "2"],
]
NEED_NONE = [
    ["mlm-data", "stats", "--help"],
    ["mlm-experiment", "list"],
    ["mlm-report", "--help"],
]


def start(command: list[str], folder: Path, torch: str | None) -> "subprocess.CompletedProcess[str]":
    """A command in an empty folder, with the metadata of a torch before the installed one's."""
    path = [str(ROOT)]
    if torch:
        metadata = folder.parent / f"torch-{torch}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n", encoding="utf-8")
        path.insert(0, str(folder.parent))
    words = [str(ROOT / word) if word == CONFIG else word for word in command[1:]]
    return subprocess.run(
        [sys.executable, "-P", "-c", START, command_names()[command[0]], *words],
        cwd=folder, env=os.environ | {"PYTHONPATH": os.pathsep.join(path)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


@pytest.mark.parametrize("command", NEED_TORCH, ids=lambda command: " ".join(command[:2]))
def test_a_command_that_needs_torch_refuses_one_outside_the_range(command: list[str], folder: Path) -> None:
    done = start(command, folder, "1.13.1+cu117")
    sentence = f"torch 1.13.1+cu117 does not fit, torch{TORCH_RANGE} is needed: pip install 'torch{TORCH_RANGE}'"
    assert (done.returncode, done.stderr) == (2, f"error: {sentence}\n")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("command", NEED_NONE, ids=lambda command: " ".join(command[:2]))
def test_a_command_that_needs_none_does_not_look_at_it(command: list[str], folder: Path) -> None:
    done = start(command, folder, "1.13.1+cu117")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.parametrize("found", ["2.11.0+cu130", "2.12.0a0+5bac5d2.nv26.3", "2.13.0+cpu", "2.15.1"])
def test_a_version_inside_the_range_fits(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    check_torch()


@pytest.mark.parametrize("found", ["1.13.1", "2.1.2", "2.10.0", "2.16.0", "2.16.0.dev20261101+cpu", "3.0.0"])
def test_a_version_outside_the_range_does_not(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    with pytest.raises(UnfitTorch, match="does not fit"):
        check_torch()


def test_a_torch_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(UnfitTorch, match="torch is not installed: pip install"):
        check_torch()


def test_the_range_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"torch{TORCH_RANGE}" in project["dependencies"]
