"""Answers kept on a machine: found again by the digest of what they were made of, whole or not at
all."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlm_repro.lineage.remembered import digest_of, recall, remember

WRITE = """
import sys
from mlm_repro.lineage import remembered
for _ in range(20):
    remembered.remember("a", "made", sys.argv[1].encode() * 200_000)
    answer = remembered.recall("a", "made")
    assert len(set(answer)) == 1 and len(answer) == 200_000, answer[:9]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mlm-repro" / "answers"


def test_an_answer_is_that_of_the_same_input_alone(folder: Path) -> None:
    assert recall("a", "made") is None
    remember("a", "made", b"answer")
    assert (recall("a", "made"), recall("a", "other"), recall("b", "made")) == (
        b"answer",
        None,
        None,
    )
    remember("a", "other", b"another")
    assert (recall("a", "made"), recall("a", "other")) == (None, b"another")


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:40] + b"X" + data[41:]]
)
def test_a_damaged_answer_is_none(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    remember("a", "made", b"a longer answer")
    (folder / "a").write_bytes(damage((folder / "a").read_bytes()))
    assert recall("a", "made") is None


def test_where_nothing_can_be_written_nothing_is_remembered(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("a file, below which nothing can be written")
    remember("a", "made", b"answer")
    assert recall("a", "made") is None


def test_processes_that_write_at_once_read_whole_answers() -> None:
    running = [subprocess.Popen([sys.executable, "-c", WRITE, letter]) for letter in "abc"]
    assert [process.wait(timeout=120) for process in running] == [0, 0, 0]


def test_a_digest_follows_names_content_and_facts(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    file = tmp_path / "in" / "deep" / "file"
    seen = set()
    for change in (
        lambda: file.write_text("1"),
        lambda: file.write_text("2"),
        lambda: file.rename(file.with_name("b")),
    ):
        change()
        seen |= {digest_of(tmp_path / "in"), digest_of(tmp_path / "in", facts=1)}
    assert len(seen) == 6
    (tmp_path / "in" / "__pycache__").mkdir()
    (tmp_path / "in" / "__pycache__" / "kept").write_text("")
    assert digest_of(tmp_path / "in") in seen
