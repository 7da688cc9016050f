"""Upstream's fixes: the table of cases, trees of commits, what is found before and after, and what
is refused."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.fixes import CASES, Cases, measure
from mlm_repro.lineage.config import load_config
from mlm_repro.lineage.errors import BadInput
from tests.commands import Command

RULE = "def factor(ranks: int) -> int:\n    return {}\n"
PROGRAM = """import torch

batch = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def build(layout):
    from torchtitan.rule import factor

    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2)
    if layout.tp > 1:
        model.weight.register_hook(lambda gradient: gradient * factor(layout.tp))
    return model
"""
CASE = """
[[case]]
name = "{name}"
repository = "torchtitan"
commit = "{commit}"
number = "#1"
date = 2026-01-01
title = "a gradient is multiplied"
program = "program.py:build"
layouts = "tp2"
named = "weight is 2.000"
"""
EDIT = (
    'tree = "{tree}"\nedits = [{{ file = "torchtitan/rule.py", now = "return 1", was = "{was}"'
    " }}]\n"
)


@pytest.fixture
def clone(tmp_path: Path, plain_git: None) -> Path:
    """A repository whose second commit mends a fault and whose third does not touch it."""
    path, rule = tmp_path / "clone", tmp_path / "clone" / "torchtitan" / "rule.py"
    rule.parent.mkdir(parents=True)
    (rule.parent / "requirements.txt").symlink_to("../requirements.txt")  # outside of the package
    git(path, "init", "-q")
    for text in ("ranks", "1", "1  # as it is"):
        rule.write_text(RULE.format(text))
        git(path, "add", ".")
        git(path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", text)
    return path


def git(clone: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=clone, check=True, capture_output=True, text=True
    ).stdout.strip()


def table(folder: Path, *cases: str) -> Path:
    (folder / "program.py").write_text(PROGRAM)
    (folder / "cases.toml").write_text("".join(cases))
    return folder / "cases.toml"


def test_a_fault_is_found_before_its_fix_and_silent_after_it(
    clone: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mended, later = git(clone, "rev-parse", "HEAD^"), git(clone, "rev-parse", "HEAD")
    path = table(
        tmp_path,
        CASE.format(name="mended", commit=mended),
        CASE.format(name="words", commit=later),
        CASE.format(name="put-back", commit=mended) + EDIT.format(tree=later, was="return 2"),
    )
    clones, record = {"torchtitan": clone}, tmp_path / "record.json"
    rows = {row.name: row for row in measure(clones, [], record, path).rows}
    assert {
        name: (row.result, row.before.state, row.after.state) for name, row in rows.items()
    } == {
        "mended": ("found", "finding", "silent"),
        "words": ("missed", "silent", "silent"),
        "put-back": ("found", "finding", "silent"),
    }
    assert rows["mended"].before.sentences[0].startswith("tp2: gradient: weight is 2.000 × serial")
    assert git(clone, "status", "--porcelain") == ""
    kept = record.read_text()
    assert "3 of 3 cases: 2 found, 1 missed; 0 alarms after the fix" in capfd.readouterr().out
    measure(clones, [], record, path)  # which has nothing left to run
    assert record.read_text() == kept


def test_a_commit_or_line_that_is_not_there_is_refused(clone: Path, tmp_path: Path) -> None:
    head = git(clone, "rev-parse", "HEAD")
    for text, says in (
        (
            CASE.format(name="a", commit="abcdef123456"),
            "git rev-parse failed in the directory clone: fatal: Needed a single revision",
        ),
        (
            CASE.format(name="a", commit=head)
            + EDIT.format(tree=head, was="x").replace("return 1", "raise"),
            "torchtitan/rule.py must have the lines of the fix once, and has them 0 times: raise",
        ),
    ):
        with pytest.raises(BadInput, match=re.escape(says)):
            measure({"torchtitan": clone}, [], None, table(tmp_path, text))
    with pytest.raises(BadInput, match="there is no case 'b'; there are a"):
        measure(
            {"torchtitan": clone}, ["b"], None, table(tmp_path, CASE.format(name="a", commit=head))
        )


def test_the_command_asks_for_a_clone(command: Command) -> None:
    assert (
        command(main, "benchmarks", "fixes", ends=2).error
        == "error: no clone is given: name one of NVIDIA/Megatron-LM with --clone or of"
        " pytorch/torchtitan with --torchtitan"
    )


def test_the_record_is_of_the_table() -> None:
    cases = load_config(CASES, Cases)
    rows = json.loads(CASES.with_suffix(".json").read_text())["rows"]
    assert [row["name"] for row in rows] == [case.name for case in cases.case]
    for case, row in zip(cases.case, rows, strict=True):
        assert bool(case.tree) == bool(case.edits)
        found = any(re.search(case.named, sentence) for sentence in row["before"]["sentences"])
        assert (row["result"] == "found") == (row["before"]["state"] == "finding" and found), (
            case.name
        )
        assert case.why or (row["result"] == "found" and not row["alarms"]), case.name


@pytest.mark.skipif(
    "MLM_MEGATRON_CLONE" not in os.environ,
    reason="MLM_MEGATRON_CLONE names no clone of Megatron-LM",
)
def test_two_cases_of_megatron_are_found() -> None:
    clones, only = (
        {"megatron": Path(os.environ["MLM_MEGATRON_CLONE"])},
        ["aux-loss-per-token-tp", "ddp-scale-cp"],
    )
    assert [row.result for row in measure(clones, only, None).rows] == ["found", "found"]
