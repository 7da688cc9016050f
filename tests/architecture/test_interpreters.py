"""Tests that are run with other Pythons and versions of torch are counted."""

import os
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

from tests.architecture.rooms import ROOT
from tests.interpreters import make_environment, requirements, run_tests

TESTS = """
import subprocess, sys
import pytest

def test_that_holds(): pass

@pytest.mark.skip(reason="because")
def test_left_out(): pass

def test_that_does_not(): assert 1 == 2

@pytest.fixture
def broken(): raise OSError

def test_that_cannot_begin(broken): pass

def test_that_imports_torch_later(): import torch

def test_that_starts_a_program():
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
"""


def test_tests_are_counted(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(TESTS.replace("import torch", "pass"), encoding="utf-8")
    record = run_tests(Path(sys.executable), [str(tmp_path)])
    assert (record["passed"], record["failed"], record["skipped"]) == (3, 2, 1)
    assert record["python"] == ".".join(map(str, sys.version_info[:3]))


def test_what_fails_for_want_of_torch_alone_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")", encoding="utf-8")
    (tmp_path / "test_a.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "test_b.py").write_text("import torch.nn\ndef test(): pass\n", encoding="utf-8")
    (tmp_path / "test_c.py").write_text("import nothing\ndef test(): pass\n", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "conftest.py").write_text("from torch import nn\n", encoding="utf-8")
    (tmp_path / "folder" / "test_d.py").write_text("def test(): pass\n", encoding="utf-8")
    options = ["-p", "tests.without_torch", "-rs", "--continue-on-collection-errors"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, tmp_path],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1
    assert "1 failed, 1 passed, 5 skipped, 2 errors" in done.stdout
    assert done.stdout.count(": torch is not installed\n") == 3, "one line for each file or folder"


def test_a_python_that_is_not_there_is_said() -> None:
    assert make_environment("3.99") is None


def test_what_needs_torch_is_left_out() -> None:
    names = {Requirement(text).name for text in requirements()}
    assert {"numpy", "pytest-timeout", "hypothesis"} <= names
    assert not names & {"torch", "accelerate", "megatron-core", "triton", "ruff"}
