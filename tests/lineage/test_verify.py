"""`mlm-verify`: what is on disk is what was written, or the file that is not is named."""

import shutil
from pathlib import Path

import pytest

from mlm_repro.lineage.digest import read_digest, seal
from mlm_repro.lineage.errors import IntegrityFailure
from mlm_repro.lineage.kinds import ALWAYS_FREE
from mlm_repro.lineage.run import RunDirectory
from mlm_repro.lineage.verified import check_seal_once
from mlm_repro.verify.recomputed import KINDS
from tests.commands import Outcome, call
from tests.experiments.packed import TRAINING, packed


def verify(path: Path) -> Outcome:
    return call({}, "mlm-verify", "run", path, "--quiet")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A complete training of an earlier version, with two sealed checkpoints inside, and what it
    was trained on."""
    return RunDirectory(packed(TRAINING)(tmp_path))


def test_every_sealed_directory_is_said_to_be_ok_with_what_was_compared(run: RunDirectory) -> None:
    done = verify(run.path)
    checkpoints = sorted((run.path / "checkpoints").iterdir())
    compared = (
        "digests of 3 sealed directories; files and keys of a training; datasets; metrics;"
        " checkpoints"
    )
    assert (done.code, done.out.splitlines()) == (
        0,
        [
            *(f"ok {read_digest(each)[:16]} {each.resolve()}" for each in checkpoints),
            f"compared: {compared}",
            *(
                "not computed again: the last bits in model-tp00-pp000.safetensors and"
                f" optimizer-tp00-pp000.safetensors of {each.name}, of which an earlier version"
                " kept no checksums"
                for each in checkpoints
            ),
            f"nothing contradicts: {'; '.join((*ALWAYS_FREE, *KINDS['training'].free))}",
            f"ok {run.digest[:16]} {run.path.resolve()}",
        ],
    )
    assert call({}, "mlm-verify", "run", run.path, "--strict").code == 0


def test_strictly_what_is_not_here_is_a_failure(run: RunDirectory) -> None:
    shutil.rmtree(next(run.path.parent.glob("tiny-*")))
    assert "not compared, as it is not here: dataset (tiny-1d71ab2f)" in verify(run.path).out
    done = call({}, "mlm-verify", "run", run.path, "--strict")
    assert done.code == 6
    assert done.error.endswith(
        " does not pass --strict: 1 things that belong to it are not on this machine and were not"
        " compared, first dataset"
        " (tiny-1d71ab2f)"
    )


def test_without_a_manifest_nothing_is_known_but_a_checkpoint_or_a_page(run: RunDirectory) -> None:
    checkpoint = min((run.path / "checkpoints").iterdir())
    assert (
        "compared: digests of 1 sealed directories; files and keys of a checkpoint"
        in verify(checkpoint).out
    )
    (checkpoint / "page.html").write_text("9.3")
    seal(checkpoint)
    assert (verify(checkpoint).code, "has page.html" in verify(checkpoint).err) == (6, True)
    (run.path / "manifest.json").unlink()
    seal(run.path)
    assert (verify(run.path).code, "is of an unknown kind" in verify(run.path).err) == (
        6,
        True,
    )


def test_what_a_killed_writer_left_hidden_is_no_failure(run: RunDirectory) -> None:
    leftover = run.path / "checkpoints" / ".iter_0000002.old-1"
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


def test_a_link_that_a_power_cut_left_behind_stops_no_check(run: RunDirectory) -> None:
    """A name's link is made hidden in the run and renamed; where the renaming was lost it leads
    nowhere."""
    (run.path / ".355m-tiny.link-1").symlink_to(run.path.name)
    check_seal_once(run.path)
    (run.path / "summary.json").write_text("{}")
    with pytest.raises(IntegrityFailure, match="was changed"):
        check_seal_once(run.path)
