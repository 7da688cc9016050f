"""Ordinary accidents: nothing is mixed, nothing is lost, and the exit code is a documented one."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlm_repro.lineage.atomic import OVERWRITE, hidden_beside, new_directory, write_json
from mlm_repro.lineage.chain import checkpoint_path, read_newest
from mlm_repro.lineage.digest import seal
from mlm_repro.lineage.errors import BadInput, Interrupted
from mlm_repro.lineage.lock import LOCK, check_place, locked
from mlm_repro.lineage.run import RunDirectory
from tests.lineage.conftest import Start, ended


def begin(root: Path, **config: Any) -> RunDirectory:
    return RunDirectory.begin(root, "work", "training", config, {})


def test_a_directory_named_like_the_work_is_not_taken_for_it(tmp_path: Path) -> None:
    mine, theirs = begin(tmp_path / "mine", seed=9), begin(tmp_path / "theirs", seed=1234)
    shutil.rmtree(mine.path)
    shutil.copytree(theirs.path, mine.path)
    with pytest.raises(BadInput, match="holds the result of other work"):
        begin(tmp_path / "mine", seed=9)
    shutil.copytree(theirs.path, tmp_path / "theirs" / "other")
    with pytest.raises(BadInput, match="does not lead to a run that began as other"):
        RunDirectory.open_named(tmp_path / "theirs", "other")


@pytest.mark.parametrize("begins_anew", [False, True])
def test_a_run_that_is_moved_while_it_works_is_not_sealed(
    tmp_path: Path, begins_anew: bool
) -> None:
    run = begin(tmp_path)
    with locked(run.path):
        run.path.rename(tmp_path / "aside")
        if begins_anew:
            shutil.copytree(tmp_path / "aside", run.path)
        with pytest.raises(Interrupted, match="was moved, removed or replaced"):
            run.complete()
    assert not list(tmp_path.glob("*/COMPLETE"))


def test_a_checkpoint_that_is_removed_while_it_is_read_gives_way_to_the_next(
    tmp_path: Path,
) -> None:
    for iteration in (1, 2):
        path = checkpoint_path(tmp_path, iteration)
        path.mkdir(parents=True)
        write_json(path / "index.json", {})
        seal(path)

    def read(chosen: Path) -> str:
        if chosen.name == "iter_0000002":
            shutil.rmtree(chosen)
        return (chosen / "index.json").parent.name if (chosen / "index.json").read_text() else ""

    assert read_newest(tmp_path, read) == "iter_0000001"


def test_an_output_replaces_no_input_no_sealed_file_and_no_other_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, result, sealed, pipe = (
        tmp_path / name for name in ("text.jsonl", "result.json", "run/x.json", "pipe")
    )
    text.write_text("{}")
    result.write_text('{"metrics": 1}')
    begin(tmp_path / "run")
    seal(sealed.parent)
    os.mkfifo(pipe)

    def said(path: Path, *others: object) -> str:
        monkeypatch.setattr(sys, "argv", ["mlm-eval", "--json", str(path), *map(str, others)])
        try:
            check_place("--json", path, '"metrics"')
        except BadInput as error:
            return str(error)
        return ""

    assert "is named twice in this command" in said(
        text, f"--ckpt={tmp_path}/../{tmp_path.name}/text.jsonl"
    )
    assert "exists and is no result of this kind" in said(text)
    assert "is complete and takes no more files: name another place" in said(sealed)
    assert said(result) == said(pipe) == said(tmp_path / "new.json") == ""
    monkeypatch.setenv(OVERWRITE, "1")
    assert said(text) == ""


def test_a_file_that_another_process_will_write_is_refused(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from mlm_repro.lineage.lock import check_place, release_claims
check_place("--json", Path(sys.argv[1]), "metrics")
print("mine", flush=True)
sys.stdin.read()
release_claims()
"""
    command = [sys.executable, "-c", code, str(tmp_path / "result.json")]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert first.stdout
    assert first.stdout.readline() == "mine\n"
    with pytest.raises(BadInput, match="another process is about to write"):
        check_place("--json", tmp_path / "result.json", "metrics")
    first.communicate("", timeout=600)
    assert not list(tmp_path.iterdir())


def test_a_pipe_and_a_link_are_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    os.mkfifo(pipe)
    target.write_text("")
    link.symlink_to(target)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
    write_json(pipe, {"a": 1})
    write_json(link, {"a": 1})
    assert (
        json.loads(reader.communicate(timeout=60)[0]) == json.loads(target.read_text()) == {"a": 1}
    )
    assert pipe.is_fifo()
    assert link.is_symlink()


def test_a_new_directory_is_claimed_once(tmp_path: Path) -> None:
    with new_directory(tmp_path / "out", claims=True) as first:
        with pytest.raises(FileExistsError), new_directory(tmp_path / "out", claims=True):
            raise AssertionError
        (first / "mine").write_text("mine")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    with pytest.raises(BadInput), new_directory(tmp_path / "failed", claims=True):
        raise BadInput("it failed")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(FileExistsError), new_directory(tmp_path / "shared", claims=True):
        (tmp_path / "shared" / "theirs").write_text("theirs")
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["theirs"]


def test_of_what_looks_unfinished_only_the_holders_own_is_removed(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("0123abcd-\n")
    mine, theirs, begun = (
        tmp_path / f".{name}"
        for name in ("a.partial-0123abcd-7", "x.old-1", "manifest.json.partial-89abcdef-7")
    )
    for path in (mine, theirs, begun):
        path.mkdir()
    with locked(tmp_path):
        assert (mine.exists(), theirs.exists(), begun.exists()) == (False, True, False)
        of_a_killed_child = hidden_beside(tmp_path / "c", "partial")
        of_a_killed_child.mkdir()
    assert (of_a_killed_child.exists(), theirs.exists()) == (False, True)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "3"}, "RANK is set, and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE is 'abc', not a whole number from 1 to a million"),
        ({"NUMBA_NUM_THREADS": "0"}, "NUMBA_NUM_THREADS is '0'"),
        ({"RANK": "1", "WORLD_SIZE": "9" * 5000}, "WORLD_SIZE is '999"),
    ],
)
def test_an_odd_environment_variable_is_named(
    start: Start, variables: dict[str, str], words: str
) -> None:
    code, _, err = ended(start("run", "x", **variables))
    assert (code, err.count("\n"), words in err) == (2, 1, True)


@pytest.mark.parametrize("redirected", [">&-", "2>&-", ">&- 2>&-", "| head -c 1", ">/dev/full"])
def test_without_a_reader_the_work_is_done_once(application: Path, redirected: str) -> None:
    command = (
        f"{sys.executable} {application} lines 100000 {redirected}; echo ${{PIPESTATUS[0]}} >&3"
    )
    done = subprocess.run(
        ["bash", "-c", f"{{ {command}; }} 3>&2"], capture_output=True, text=True, timeout=600
    )
    code = done.stderr.split()[-1]
    assert "Traceback" not in done.stderr
    assert code == ("7" if "full" in redirected else "0")


@pytest.mark.parametrize(
    "numbers", [[signal.SIGHUP], [signal.SIGTERM, signal.SIGTERM], [signal.SIGHUP, signal.SIGINT]]
)
def test_a_stop_is_a_stop_and_a_second_one_changes_nothing(
    start: Start, numbers: list[int]
) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup of the tests would be inherited
    process = start("wait")
    assert process.stdout
    process.stdout.readline()
    for number in numbers:
        process.send_signal(number)
    assert process.wait(600) == Interrupted.exit_code
