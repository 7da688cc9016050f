"""`mlm-verify`: what is on disk is what was written, or the file that is not is named."""

from pathlib import Path

import pytest

from lineage.digest import read_digest, seal
from lineage.run import RunDirectory
from tests.commands import Outcome, call


def verify(path: Path) -> Outcome:
    return call({}, "mlm-verify", "run", path, "--quiet")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A complete run with a sealed checkpoint inside."""
    run = RunDirectory.begin(tmp_path, "work", "work", {}, {})
    checkpoint = run.path / "checkpoints" / "iter_1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights").write_bytes(b"weights")
    seal(checkpoint)
    (run.path / "metrics.jsonl").write_text("{}\n")
    run.complete()
    return run


def test_every_sealed_directory_is_said_to_be_ok(run: RunDirectory) -> None:
    done = verify(run.path.parent / "work")
    checkpoint = run.path / "checkpoints" / "iter_1"
    assert done.code == 0
    assert done.out.splitlines() == [
        f"ok {read_digest(checkpoint)[:16]} {checkpoint.resolve()}",
        f"ok {run.digest[:16]} {run.path.resolve()}",
    ]


def test_a_changed_file_is_named(run: RunDirectory) -> None:
    (run.path / "checkpoints" / "iter_1" / "weights").write_bytes(b"x")
    done = verify(run.path)
    assert (done.code, done.err.count("\n")) == (6, 1)
    assert "checkpoints/iter_1/weights was changed" in done.err


def test_a_report_with_a_seal_of_its_own_is_checked_by_it(run: RunDirectory) -> None:
    report = run.path / "report"
    report.mkdir()
    (report / "index.html").write_text("page")
    seal(report)
    assert verify(run.path).code == 0
    (report / "index.html").write_text("edited page")
    done = verify(run.path)
    assert done.code == 6
    assert "report/index.html" in done.err


def test_what_a_killed_writer_left_hidden_is_no_failure(run: RunDirectory) -> None:
    leftover = run.path / "checkpoints" / ".iter_1.old-1"
    leftover.mkdir()
    (leftover / "weights").write_bytes(b"weights")
    seal(leftover)
    (leftover / "weights").unlink()
    assert verify(run.path).code == 0


@pytest.mark.parametrize("name", ["nowhere", "file"])
def test_what_is_not_a_directory_is_bad_input(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    done = verify(tmp_path / name)
    assert (done.code, done.out) == (2, "")
    assert "is not a directory" in done.err
