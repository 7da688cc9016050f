"""A power cut takes nothing that was finished, and a write that is not synced in time is found."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mlm_repro.lineage import atomic, digest
from mlm_repro.lineage.atomic import new_directory, write_json
from mlm_repro.lineage.command import _unforeseen
from mlm_repro.lineage.digest import MARKER, check_seal, is_sealed, seal
from mlm_repro.lineage.errors import UserError
from mlm_repro.lineage.files import read_object
from mlm_repro.lineage.run import MANIFEST, RunDirectory
from tests.architecture.rooms import ROOT
from tests.chaos.faults import instrument
from tests.chaos.power import History, Moment, Recorder

SEEDS = 500

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def work(runs: Path) -> None:
    """A run with two checkpoints, the first of which goes, metrics that are only appended to, and a
    seal."""
    run = RunDirectory.begin(runs, "work", "training", {"a": 1}, {})
    with run.filled(), (run.path / "metrics.jsonl").open("a") as metrics:
        for number in (1, 2):
            metrics.write(f'{{"iteration": {number}}}\n')
            metrics.flush()
            with new_directory(run.path / "checkpoints" / f"iter_000000{number}") as checkpoint:
                (checkpoint / "model.safetensors").write_bytes(bytes([number]) * 5000)
                seal(checkpoint)
        for path in sorted((run.path / "checkpoints" / "iter_0000001").iterdir()):
            path.unlink()
        (run.path / "checkpoints" / "iter_0000001").rmdir()
        write_json(run.path / "summary.json", {"loss": 1.0})
        run.complete()


def recorded(
    folder: Path, change: Callable[[], object], without: Callable[[Moment], bool] = lambda _: False
) -> History:
    """The history of the work, done in a process of its own after a change of the code, and
    `without` some syncs."""
    (folder / "place").mkdir(parents=True)
    child = os.fork()
    if not child:
        code = 1
        with suppress(BaseException):
            change()
            points = Recorder(folder / "place", folder / "journal")
            instrument(folder / "place", None, points)
            points.note("begin", "work")
            work(folder / "place" / "runs")
            points.note("end", "")
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return History(folder / "journal", without)


def failure(history: History, seed: int, place: Path) -> str:
    """What is lost or torn on the disk of that seed."""
    place.mkdir()
    cut = history.lay(seed, place)
    for marker in history.finished(cut):
        if not (place / marker).is_file():
            return f"{marker} is lost"
    try:
        for path in place.rglob("*.json"):
            if path.name == MANIFEST:
                read_object(path)
        for path in place.rglob(MARKER):
            if not any(part.startswith(".") for part in path.relative_to(place).parts):
                check_seal(path.parent)
    except UserError as error:
        return str(error)
    return ""


def nothing() -> None:
    pass


def is_sync_of_written(moment: Moment) -> bool:
    """True for `os.fsync` in `write_bytes`."""
    entry = moment.tree.get(moment.path)
    return (
        moment.kind == "fsync"
        and ".partial-" in moment.path
        and entry is not None
        and entry.kind == "file"
    )


def no_sync_of_sealed() -> None:
    digest.sync = lambda path: None


def no_sync_of_folders() -> None:
    whole = atomic.sync
    atomic.sync = lambda path: None if path.is_dir() else whole(path)


def sealed_before_it_is_renamed_and_synced_after() -> None:
    """The marker is durable, then the directory gets its name, and its files are synced last."""
    publish = atomic.publish_directory

    def late(temporary: Path, path: Path, durable: bool = True) -> None:
        publish(temporary, path, durable=False)
        atomic.sync(path.parent)
        for each in path.rglob("*"):
            atomic.sync(each)

    atomic.publish_directory = late
    digest.sync = lambda path: None


def renamed_before_it_is_synced() -> None:
    """`write_bytes` gives a file its name and syncs it then."""

    def write_bytes(path: Path, data: bytes, replaces: bool = True) -> bool:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not replaces and path.exists():
            return False
        temporary = atomic.hidden_beside(path, "partial")
        temporary.write_bytes(data)
        os.replace(temporary, path)
        atomic.sync(path.parent)
        atomic.sync(path)
        return True

    atomic.write_bytes = write_bytes


def test_nothing_finished_is_lost_and_nothing_sealed_is_torn(tmp_path: Path) -> None:
    history = recorded(tmp_path, nothing)
    found = {seed: failure(history, seed, tmp_path / f"disk-{seed}") for seed in range(SEEDS)}
    assert {seed: each for seed, each in found.items() if each} == {}
    assert any((tmp_path / f"disk-{seed}" / "runs").is_dir() for seed in found)
    disks = (tmp_path / f"disk-{seed}" for seed in found)
    assert (
        len(
            {
                tuple(sorted(str(path.relative_to(disk)) for path in disk.rglob("*")))
                for disk in disks
            }
        )
        > 25
    )


def test_a_seed_gives_the_same_disk_again(tmp_path: Path) -> None:
    history = recorded(tmp_path, nothing)

    def disk(name: str) -> dict[str, bytes]:
        (tmp_path / name).mkdir()
        history.lay(7, tmp_path / name)
        files = (path for path in (tmp_path / name).rglob("*") if path.is_file())
        return {str(path.relative_to(tmp_path / name)): path.read_bytes() for path in files}

    assert disk("one") == disk("other")


@pytest.mark.parametrize(
    ("change", "without"),
    [
        (nothing, is_sync_of_written),
        (no_sync_of_sealed, lambda moment: False),
        (no_sync_of_folders, lambda moment: False),
        (renamed_before_it_is_synced, lambda moment: False),
        (sealed_before_it_is_renamed_and_synced_after, lambda moment: False),
    ],
)
def test_a_sync_that_is_left_out_or_comes_late_is_found(
    change: Callable[[], object], without: Callable[[Moment], bool], tmp_path: Path
) -> None:
    history = recorded(tmp_path, change, without)
    assert any(failure(history, seed, tmp_path / f"disk-{seed}") for seed in range(SEEDS))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_reproduction_survives_cuts() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.power", "--seeds", "10"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "10 of 10 cuts survived" in done.stdout


@pytest.mark.parametrize("call", ["read", "fsync", "close"])
def test_an_error_of_the_disk_is_a_documented_code_and_leaves_what_was_there(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each call in turn, as far as there are any; without it the same work then ends."""
    number, codes = 0, set[int]()
    while True:
        with monkeypatch.context() as patch:
            _failing(patch, call, number)
            try:
                work(tmp_path / "runs")
            except (OSError, UserError) as error:
                codes.add(
                    error.exit_code
                    if isinstance(error, UserError)
                    else _unforeseen(error).exit_code
                )
            else:
                break
        for marker in (tmp_path / "runs").rglob(MARKER):
            if is_sealed(marker.parent) and "/." not in str(marker):
                check_seal(marker.parent)
        number += 1
    assert number > 2
    assert codes <= {2, 6, 7}
    (run,) = (path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
    check_seal(run)


def _failing(patch: pytest.MonkeyPatch, call: str, number: int) -> None:
    """Let the call of that number, from 0, end with EIO."""
    seen = [0]

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            seen[0] += 1
            if seen[0] - 1 == number:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*args, **options)

        return called

    if call == "read":
        patch.setattr(digest, "sha256_file", failing(digest.sha256_file))
        patch.setattr(atomic, "open_file", failing(atomic.open_file))
    elif call == "fsync":
        patch.setattr(os, "fsync", failing(os.fsync))
    else:
        patch.setattr(os, "close", failing(os.close))
