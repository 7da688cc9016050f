"""A torch that does not fit: one sentence and exit code 2 from what needs it, and nothing from what
does not."""

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mlm_repro.lineage import command
from mlm_repro.lineage.errors import BadInput, Fault
from mlm_repro.lineage.extras import TORCH_RANGE, check_torch
from tests.architecture.rooms import ROOT, command_names

CONFIG = "experiments/models/355m.toml"
START = (
    "import importlib, sys; module, name = sys.argv.pop(1).split(':');"
    " getattr(importlib.import_module(module), name)()"
)
UNFIT = (
    f"torch 1.13.1+cu117 does not fit, torch{TORCH_RANGE} is needed: pip install"
    f" 'torch{TORCH_RANGE}'"
)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["mlm-train", CONFIG, "--twin", "--ranks", "2"], 2, f"error: {UNFIT}\n"),
        (["mlm-experiment", "reproduce", "355m", "--smoke"], 2, f"error: {UNFIT}\n"),
        (["mlm-data", "stats", "--help"], 0, ""),
        (["mlm-experiment", "list"], 0, ""),
    ],
    ids=lambda words: " ".join(words[:2]) if isinstance(words, list) else "",
)
def test_a_command_that_needs_torch_refuses_one_outside_the_range(
    words: list[str], code: int, said: str, tmp_path: Path
) -> None:
    metadata, folder = tmp_path / "torch-1.13.1+cu117.dist-info" / "METADATA", tmp_path / "empty"
    metadata.parent.mkdir()
    metadata.write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 1.13.1+cu117\n", encoding="utf-8"
    )
    folder.mkdir()
    given = [str(ROOT / word) if word == CONFIG else word for word in words[1:]]
    done = subprocess.run(
        [sys.executable, "-P", "-c", START, command_names()[words[0]], *given],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr, list(folder.iterdir())) == (code, said, [])


def test_a_fault_under_an_unfit_torch_names_the_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = ModuleNotFoundError("No module named 'torch'", name="torch")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.13.1+cu117")
    assert str(command._unforeseen(absent)) == UNFIT
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert isinstance(command._unforeseen(KeyError("of something else")), Fault)


@pytest.mark.parametrize(
    "found", ["2.11.0+cu130", "2.12.0a0+5bac5d2.nv26.3", "2.13.0+cpu", "2.15.1"]
)
def test_a_version_inside_the_range_fits(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    check_torch()


@pytest.mark.parametrize(
    "found", ["1.13.1", "2.1.2", "2.10.0", "2.16.0", "2.16.0.dev20261101+cpu", "3.0.0"]
)
def test_a_version_outside_the_range_does_not(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    with pytest.raises(BadInput, match="does not fit"):
        check_torch()


def test_a_torch_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(BadInput, match="torch is not installed: pip install"):
        check_torch()


def test_the_range_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"torch{TORCH_RANGE}" in project["dependencies"]
