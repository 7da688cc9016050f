"""A build that is killed anywhere goes on, and ends with the same bytes."""

import os
import random
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from mlm_repro.data_pipeline.config import DataConfig
from mlm_repro.lineage.digest import check_seal
from mlm_repro.lineage.errors import BadInput, Interrupted
from mlm_repro.lineage.lock import LOCK, locked
from tests.data_pipeline.builds import build, config_for, files_of, in_child, ledger_of, write_mixed
from tests.data_pipeline.conftest import leftovers

TOUCHES = {"open", "os.rename", "os.mkdir", "os.remove", "shutil.rmtree"}
"""Audit events of a process that changes files: the points between which a kill makes a
difference."""


class Killer:
    """Kills its own process with SIGKILL at the `at`-th touch of a file under `root`, or the first
    of stage `at`."""

    def __init__(self, root: Path, at: int | str) -> None:
        self._root, self._at, self.count = str(root), at, 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in TOUCHES and str(arguments[0]).startswith(self._root):
            self.count += 1
            if self.count == self._at or f"/.work/{self._at}" in str(arguments[0]):
                os.kill(os.getpid(), signal.SIGKILL)


def build_until(
    folder: Path, config: DataConfig, root: str, at: int | str, report: Path | None = None
) -> None:
    killer = Killer(folder / root, at)
    sys.addaudithook(killer)
    build(folder, config, root)
    if report:
        report.write_text(str(killer.count))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def config(folder: Path) -> DataConfig:
    return config_for(f"jsonl:{write_mixed(folder, 60)}", "shard_bytes=65536")


@pytest.fixture(scope="module")
def whole(folder: Path, config: DataConfig) -> Path:
    return build(folder, config, "whole")


def test_killed_anywhere_gives_the_same_bytes(
    folder: Path, config: DataConfig, whole: Path
) -> None:
    """Twelve builds are killed at random, some of them again and again."""
    points, seed = 12, 1
    report = folder / "touches"
    assert in_child(build_until, folder, config, f"counted-{seed}", -1, report) == 0
    touches = int(report.read_text())
    assert touches > 100
    rng = random.Random(seed)
    killed = 0
    for number in range(points):
        root = f"killed-{seed}-{number}"
        at = rng.randrange(1, touches)
        while os.WIFSIGNALED(in_child(build_until, folder, config, root, at)):
            killed += 1
            at = rng.randrange(1, touches)
        again = build(folder, config, root)
        assert files_of(again) == files_of(whole), f"killed at touch {at}"
        assert ledger_of(again) == ledger_of(whole)
        check_seal(again)
        shutil.rmtree(folder / root)
    assert killed >= points


def test_finished_tasks_are_not_repeated(folder: Path, config: DataConfig, whole: Path) -> None:
    """A second run reads the markers; a changed file of a task costs that task and what depends on
    it."""
    build_dead = in_child(build_until, folder, config, "again", "order")
    assert os.WIFSIGNALED(build_dead)
    (run,) = (folder / "again").iterdir()
    prepared = sorted((run / ".work" / "prepare").glob("*/DONE"))
    assert prepared
    before = {path: path.stat().st_mtime_ns for path in prepared}
    damaged = prepared[0].parent / "documents.jsonl"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b" ")
    killed = in_child(build_until, folder, config, "again", "order")
    assert os.WIFSIGNALED(killed)
    after = {path: path.stat().st_mtime_ns for path in prepared}
    assert [path for path in prepared if after[path] != before[path]] == prepared[:1]
    assert files_of(build(folder, config, "again")) == files_of(whole)


def test_one_process_at_a_time(folder: Path, config: DataConfig) -> None:
    started = build(folder, config, "one")
    (started / "COMPLETE").unlink()
    with locked(started), pytest.raises(BadInput, match="another process is at work"):
        build(folder, config, "one")
    assert (started / "dataset.json").is_file()
    assert build(folder, config, "one") == started
    (started / LOCK).touch()  # as a kill after the last file leaves it
    assert build(folder, config, "one") == started
    assert list(started.glob(".*")) == []


def without_room(folder: Path, config: DataConfig, root: str, largest: int, report: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    try:
        build(folder, config, root)
    except Interrupted as error:
        report.write_text(str(error))
        return
    raise AssertionError("everything fitted")


def test_full_disk_keeps_what_is_finished(tmp_path: Path) -> None:
    """No file may grow as large as the last ones are: the first stages finish, the last do not."""
    config = config_for(f"jsonl:{write_mixed(tmp_path, 200)}", "shard_bytes=65536")
    whole = build(tmp_path, config, "whole")
    largest = (whole / "documents" / "train.jsonl").stat().st_size - 1
    assert in_child(without_room, tmp_path, config, "full", largest, tmp_path / "sentence") == 0
    assert "make room" in (tmp_path / "sentence").read_text()
    (run,) = (tmp_path / "full").iterdir()
    assert len(list((run / ".work" / "prepare").glob("*/DONE"))) > 2
    assert files_of(build(tmp_path, config, "full")) == files_of(whole)


def test_too_little_room_is_said_first(
    folder: Path, config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(BadInput, match="free space"):
        build(folder, config, "small-disk")
    assert leftovers(folder / "small-disk") == []
