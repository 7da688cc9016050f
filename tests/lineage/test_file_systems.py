"""File systems without locks or without links: a run works, or is refused in a sentence."""

import errno
import fcntl
import os
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest

from mlm_repro.lineage.digest import check_seal
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.lock import NoLocks, check_place, locked
from mlm_repro.lineage.run import MANIFEST, RunDirectory
from tests.commands import call
from tests.engine.conftest import write_dataset
from tests.engine.small_run import write_toml

NO_LINK = [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK]


def failing(number: int) -> object:
    def fail(*words: object, **more: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fail


def without(number: int) -> None:
    """Make this process one on a file system without links."""
    for name in ("link", "symlink"):
        setattr(os, name, failing(number))


def without_locks() -> None:
    fcntl.flock = failing(errno.ENOLCK)  # type: ignore[assignment]


@pytest.mark.parametrize("number", NO_LINK)
def test_a_run_needs_no_links(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("link", "symlink"):
        monkeypatch.setattr(os, name, failing(number))
    run = RunDirectory.begin(tmp_path, "work", "training", {"a": 1}, {})
    assert run.is_new
    before = (run.path / MANIFEST).read_bytes()
    again = RunDirectory.begin(tmp_path, "work", "training", {"a": 1}, {})
    assert (again.is_new, (run.path / MANIFEST).read_bytes()) == (False, before)
    with locked(run.path):
        run.complete()
    check_seal(run.path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [run.path.name]


def test_a_training_needs_no_links(tmp_path: Path) -> None:
    toml = write_toml(tmp_path / "small.toml", write_dataset(tmp_path / "data"))
    done = call(
        {},
        "mlm-train",
        "run",
        toml,
        "--ranks",
        1,
        "--runs",
        tmp_path / "runs",
        ends=0,
        prepare=partial(without, errno.EOPNOTSUPP),
    )
    assert "this file system has no links" in done.err
    (run,) = (tmp_path / "runs").iterdir()
    check_seal(run)


def test_without_locks_it_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
        monkeypatch.setattr(fcntl, "flock", failing(number))
        with pytest.raises(NoLocks, match="cannot lock files"), locked(tmp_path):
            raise AssertionError
    assert issubclass(NoLocks, BadInput)
    # A claim is a courtesy among commands: none without locks.
    check_place("--json", tmp_path / "new.json", '"mark"')


def test_a_command_without_locks_says_so(tmp_path: Path) -> None:
    toml = write_toml(tmp_path / "small.toml", write_dataset(tmp_path / "data"))
    done = call(
        {},
        "mlm-train",
        "run",
        toml,
        "--ranks",
        1,
        "--runs",
        tmp_path / "runs",
        ends=2,
        prepare=without_locks,
    )
    assert "is on a file system that cannot lock files" in done.error
