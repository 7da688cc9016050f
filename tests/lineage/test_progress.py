"""Progress: whole lines where nobody watches, one redrawn line on a terminal."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lineage.progress import Progress, format_duration
from tests.lineage.conftest import Start


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("lineage.progress.time.monotonic", clock)
    return clock


def test_off_a_terminal_there_are_plain_lines_now_and_then(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("data", 100, "documents") as progress:
        for _ in range(100):
            clock.now += 1.0
            progress.advance(message="quick")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "data: 15/100 documents, 1.0/s, 1:25 left | quick",
        "data: 30/100 documents, 1.0/s, 1:10 left | quick",
        "data: 45/100 documents, 1.0/s, 0:55 left | quick",
        "data: 60/100 documents, 1.0/s, 0:40 left | quick",
        "data: 75/100 documents, 1.0/s, 0:25 left | quick",
        "data: 90/100 documents, 1.0/s, 0:10 left | quick",
        "data: 100/100 documents, 1.0/s, 1:40",
    ]


def test_work_of_an_earlier_run_is_not_in_the_rate(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("train", 1000, "iterations") as progress:
        progress.start_at(980)
        clock.now = 20.0
        progress.advance(10)
    first = capsys.readouterr().err.splitlines()[0]
    assert first == "train: 990/1,000 iterations, 0.5/s, 0:20 left"


def test_an_unknown_total_is_not_shown(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("read", None, "lines") as progress:
        clock.now = 2.0
        progress.advance(5000)
    assert capsys.readouterr().err == "read: 5,000 lines, 2,500.0/s, 0:02\n"


def test_other_ranks_are_silent(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("train", 10, "iterations", quiet=True) as progress:
        clock.now = 100.0
        progress.advance(10)
    assert capsys.readouterr().err == ""


def test_a_pipe_gets_no_escape_codes_and_no_carriage_returns(start: Start) -> None:
    process = start("count", 3)
    out, err = process.communicate(timeout=600)
    assert out == ""
    assert re.fullmatch(r"title: 3/3 things, [\d,.]+/s, 0:00\n", err)


def test_after_an_error_no_line_claims_the_end(start: Start) -> None:
    process = start("count", 3, "--fail")
    _, err = process.communicate(timeout=600)
    assert err == "error: failed while counting\n"


@pytest.mark.parametrize("options", [[], ["--fail"]])
def test_a_terminal_sees_one_line_redrawn(application: Path, options: list[str]) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, str(application), "count", "3", *options]
    with subprocess.Popen(command, stderr=theirs, stdout=subprocess.DEVNULL) as process:
        os.close(theirs)
        text = b""
        try:
            while piece := os.read(ours, 4096):
                text += piece
        except OSError:  # the other end is closed
            pass
        os.close(ours)
    assert process.returncode == (2 if options else 0)
    if options:
        assert text.endswith(b"\r\nerror: failed while counting\r\n"), "the sentence stands on a line of its own"
    else:
        assert text.startswith(b"\r\x1b[2Ktitle: ")
        assert text.count(b"\n") == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.4, "0:59"), (59.6, "1:00"), (75, "1:15"), (3599.7, "1:00:00"), (4000, "1:06:40")],
)  # fmt: skip
def test_durations_read_like_a_clock(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
