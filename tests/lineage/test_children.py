"""Processes that a command starts: what they import, where they listen, how they are stopped, what
their end means."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlm_repro.lineage.processes import exit_code_of
from tests.architecture.rooms import PACKAGE
from tests.engine.conftest import write_dataset
from tests.engine.small_run import finish, ranks_of, start, wait_for_iteration, write_toml
from tests.lineage.test_sockets import listening

PROC = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
STEP = f"""
from {PACKAGE}.experiments.reproduce.steps import run_step
from {PACKAGE}.lineage.command import run_command
run_command(lambda **_: run_step("mlm-train", "schedule", "--pp", "64", "--microbatches", "16384"))
"""
"""A step of twenty seconds, so that it has not ended by itself when it is stopped."""
BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    ("status", "stopped", "code"),
    [
        (0, True, 0),
        (1, True, 7),
        (-9, True, 7),
        (143, True, 7),
        (6, True, 6),
        (7, True, 7),
        (-11, False, 7),
        (1, False, 70),
        (3, False, 3),
        (137, False, 7),
        (70, False, 70),
    ],
)
def test_the_status_of_a_child_is_a_documented_code(status: int, stopped: bool, code: int) -> None:
    assert exit_code_of(status, stopped) == code


@PROC
def test_a_step_that_is_stopped_while_it_starts_ends_with_code_7(tmp_path: Path) -> None:
    """Its handlers do not stand for a while; the signal waits for them."""
    codes = set()
    for wait_seconds in (0.0, 0.02, 0.05, 0.1, 0.15, 0.25):
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", STEP],
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        while not ranks_of(process.pid):
            assert process.poll() is None
            time.sleep(0.001)
        time.sleep(wait_seconds)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert "Traceback" not in out + err
        codes.add(process.returncode)
    assert codes == {7}


@pytest.mark.parametrize(
    "words", ["mlm-data clean text:texts out --workers 2", "mlm-eval harness --help"]
)
def test_modules_of_the_current_folder_are_not_imported(words: str, tmp_path: Path) -> None:
    for module in ("random", "lm_eval", "selectors", "signal", "tokenize"):
        (tmp_path / f"{module}.py").write_text(
            f"open('imported-{module}', 'w')\n", encoding="utf-8"
        )
    (tmp_path / "texts").mkdir()
    for number in range(3):
        (tmp_path / "texts" / f"{number}.txt").write_text(
            "Some words of a text, and more. " * 20, encoding="utf-8"
        )
    name, *arguments = words.split()
    done = subprocess.run(
        [BIN / name, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("imported-*")) == []


@PROC
def test_ranks_of_one_machine_listen_to_this_machine_alone(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data")
    process = start(
        write_toml(tmp_path / "small.toml", data, iterations=100_000),
        "--runs",
        tmp_path,
        "--ranks",
        2,
    )
    deadline = time.monotonic() + 120
    while not (run := next(tmp_path.glob("small-*"), None)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    wait_for_iteration(process, run, 2)
    where = {address.partition(":")[0] for address in listening(process.pid)}
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 7
    assert where
    assert where <= {
        "0100007F",
        "00000000000000000000000001000000",
        "0000000000000000FFFF00000100007F",
    }, where


def test_a_child_of_a_command_imports_nothing_from_where_it_stands(tmp_path: Path) -> None:
    """The variable for it is that of Python, so that it holds for the children of libraries too."""
    (tmp_path / "json.py").write_text("raise SystemExit(9)\n", encoding="utf-8")
    ask = (
        "import json, os, subprocess, sys; print(json.dumps(subprocess.call([sys.executable, '-c',"
        " 'import json'])))"
    )
    script = (
        f"from {PACKAGE}.lineage.command import run_command\nrun_command(lambda **_: exec({ask!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert json.loads(done.stdout) == 0, done.stderr
