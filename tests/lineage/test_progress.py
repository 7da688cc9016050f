"""Cost and progress: whole lines where nobody watches, a bar on a terminal, nothing with
`--quiet`."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from mlm_repro.lineage.progress import Progress
from tests.lineage.conftest import Start, ended


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("mlm_repro.lineage.progress.monotonic", clock)
    return clock


def test_off_a_terminal_there_are_plain_lines_now_and_then(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_work_of_an_earlier_run_is_not_in_the_rate(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("train", 1000, "iterations") as progress:
        progress.start_at(980)
        clock.now = 20.0
        progress.advance(10)
    first = capsys.readouterr().err.splitlines()[0]
    assert first == "train: 990/1,000 iterations, 0.5/s, 0:20 left"


@pytest.mark.parametrize("rank", ["", "1"])
def test_other_ranks_are_silent(
    rank: str, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if rank:
        monkeypatch.setenv("RANK", rank)
    with Progress("train", 10, "iterations", quiet=not rank) as progress:
        clock.now = 100.0
        progress.advance(10)
        progress.note("warning: the loss leaps")
    assert capsys.readouterr().err == ""


SAID = re.compile(
    r"cost: counts to 3; in no time\n"
    r"warning: small\n"
    r"title: 3/3 things, [\d,.]+/s, 0:00\n"
)


def test_a_pipe_gets_lines_without_control_characters(start: Start) -> None:
    _, out, err = ended(start("count", 3))
    assert out == ""
    assert SAID.fullmatch(err), err


@pytest.mark.parametrize(
    "arguments", [["count", 3, "--quiet"], ["--quiet", "parent"], ["parent", "--quiet"]]
)
def test_quiet_leaves_warnings_alone_in_child_processes_too(
    start: Start, arguments: list[object]
) -> None:
    assert ended(start(*arguments)) == (0, "", "warning: small\n")
    assert SAID.fullmatch(start("parent").communicate(timeout=600)[1])


def test_after_an_error_no_line_claims_the_end(start: Start) -> None:
    _, _, err = ended(start("count", 3, "--fail"))
    assert err == "cost: counts to 3; in no time\nerror: failed while counting\n"


def on_a_terminal(application: Path, *arguments: object, **variables: str) -> tuple[int, str]:
    """Exit code of the application and what it wrote on a pseudo-terminal of 60 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    command = [sys.executable, str(application), *map(str, arguments)]
    environment = {**os.environ, "TERM": "xterm", **variables}
    with subprocess.Popen(command, stderr=theirs, stdout=theirs, env=environment) as process:
        os.close(theirs)
        text = b""
        try:
            while piece := os.read(ours, 4096):
                text += piece
        except OSError:  # the other end is closed
            pass
        os.close(ours)
    return process.returncode, text.decode()


def test_a_terminal_sees_a_bar_redrawn_on_one_line(application: Path) -> None:
    code, text = on_a_terminal(application, "count", 4)
    assert code == 0
    first, *lines = text.split("\r\n")
    assert first == "cost: counts to 4; in no time"
    assert lines[0].startswith(f"\r\x1b[2Ktitle: {'█' * 6}{'░' * 18} 1/4 things, ")
    assert lines[0].endswith("\r\x1b[2Kwarning: small"), "the bar makes room for a warning"
    assert lines[1].startswith(f"\r\x1b[2Ktitle: {'█' * 24} 4/4 things, ")
    assert lines[2:] == [""]
    assert all(len(drawn.removeprefix("\x1b[2K")) < 60 for drawn in re.split(r"[\r\n]+", text)), (
        "no line is broken"
    )


@pytest.mark.parametrize(
    ("option", "variables"), [("--quiet", {}), ("--no-fail", {"TERM": "dumb"})]
)
def test_quiet_and_a_terminal_that_cannot_redraw_get_no_control_characters(
    application: Path, option: str, variables: dict[str, str]
) -> None:
    code, text = on_a_terminal(application, "count", 3, option, **variables)
    assert code == 0
    assert "\x1b" not in text
    assert "\r" not in text.replace("\r\n", "")
    assert (
        text == "warning: small\r\n"
        if option == "--quiet"
        else SAID.fullmatch(text.replace("\r\n", "\n"))
    )
