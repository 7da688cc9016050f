"""SIGTERM in the first two seconds of every verb: a documented code, no traceback, and what was
there stays as it was.

The suite draws some stops by a seed. `python -m tests.lineage.test_stops --all` makes all of them:
of each verb while it starts, in copies that `copies.py` forks every 10 ms, and of each verb at
work, which is begun every time in a process that has imported what it needs, as long as it lasts.
Further words, such as `mlm-data clean`, choose verbs.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

import pytest

from mlm_repro.lineage.digest import MARKER, check_seal
from mlm_repro.lineage.errors import UserError
from tests.commands import Program
from tests.experiments.packed import unpack

BIN = Path(sys.executable).parent
COPIES, MOMENTS = (Path(__file__).with_name(name) for name in ("copies.py", "every_moment.py"))
PROGRAMS = ("mlm-data", "mlm-train", "mlm-eval", "mlm-experiment", "mlm-report", "mlm-verify")
EVERY_MS, LAST_MS = 10, 2000
AT_WORK = {
    ("mlm-data", "clean"): "text:texts out",
    ("mlm-train", "resume"): "RUN",
    ("mlm-report", "run"): "RUN",
    ("mlm-train", "run"): "355m --twin --dry-run",
    ("mlm-experiment", "simulate"): "ptd-p-runs --out out",
    ("mlm-eval", "run"): "wikitext103 --ckpt RUN --limit 2 --json scores.json",
    ("mlm-verify", "replay"): "RUN",
    ("mlm-verify", "run"): "runs --strict",
}
"""What some verbs are given to work on; the others are asked for their help, which imports what
they need to say it."""
DOCUMENTED = {0, *(each.exit_code for each in UserError.__subclasses__()), -signal.SIGTERM}
"""Exit codes, and the signal's own before Python has reached this suite's code."""


class Stop(NamedTuple):
    """A verb, and when it is stopped."""

    program: str
    verb: str
    after_ms: int


def every_stop() -> Iterator[Stop]:
    """Each verb of each program, every 10 ms of the first two seconds."""
    for script in entry_points(group="console_scripts"):
        if script.name in PROGRAMS:
            module = sys.modules[script.load().__module__]
            for command in module.app.registered_commands:
                verb = command.name or command.callback.__name__.replace("_", "-")
                yield from (Stop(script.name, verb, at) for at in range(0, LAST_MS, EVERY_MS))


def start_anew(words: list[str], place: Path) -> "subprocess.Popen[str]":
    """Start a program from nothing."""
    return subprocess.Popen(
        [BIN / words[0], *words[1:]],
        cwd=place,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def start_forked(words: list[str], place: Path) -> Program:
    """Start a program in a process that has imported what it needs, and wait until it is there."""
    process = Program(*words, folder=place, prepare=partial(Path.touch, place.parent / "begun"))
    while not (place.parent / "begun").exists() and process.poll() is None:
        time.sleep(0.001)
    return process


def wrong(
    stop: Stop,
    place: Path,
    start: Callable[[list[str], Path], "subprocess.Popen[str] | Program"] = start_anew,
) -> tuple[str, bool]:
    """What is not as it must be after the stop, in a folder of its own, empty if all is; and True
    if the verb had ended before it."""
    runs = unpack(place) / "runs"
    training = next(runs.glob("355m-tiny-*"))
    (place / "texts").mkdir()
    (place / "texts" / "a.txt").write_text(
        "Some words of a text, and more. " * 40, encoding="utf-8"
    )
    before = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    words = AT_WORK.get(stop[:2], "--help").replace("RUN", str(training)).split()
    process = start([stop.program, stop.verb, *words], place)
    with suppress(subprocess.TimeoutExpired):
        process.wait(stop.after_ms / 1000)
    has_ended = process.poll() is not None
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    code = process.wait()
    lost = [
        path.name
        for path, content in before.items()
        if not path.is_file() or path.read_bytes() != content
    ]
    said = ""
    if code not in DOCUMENTED:
        said = f"code {code}: {err[-300:]}"
    elif "Traceback" in out + err:
        said = f"a traceback: {err[-300:]}"
    elif lost:
        said = f"changed: {', '.join(lost)}"
    for marker in place.rglob(MARKER):
        check_seal(marker.parent)
    return said, has_ended


def test_every_verb_is_among_them() -> None:
    verbs = {stop[:2] for stop in every_stop()}
    assert {program for program, _ in verbs} == {*PROGRAMS}
    assert {*AT_WORK} <= verbs
    assert len(verbs) > 35


@pytest.mark.parametrize("number", range(8))
def test_a_verb_that_is_stopped_while_it_starts_ends_with_a_documented_code(
    number: int, tmp_path: Path
) -> None:
    draw = random.Random(78 + number)
    stops = list(every_stop())
    if number % 2:
        stops = [stop for stop in stops if stop[:2] in AT_WORK]
    stop = draw.choice(stops)
    assert wrong(stop, tmp_path)[0] == "", stop


@pytest.mark.parametrize(
    ("end", "code"), [("nothing", 0), ("SystemExit", 1), ("DataMissing", 5), ("ValueError", 70)]
)
def test_a_stop_at_any_instruction_of_a_command_s_end_is_a_stop_or_too_late(
    end: str, code: int
) -> None:
    """Between the end of its work and the moment from which signals are ignored there are dozens of
    instructions."""
    done = subprocess.run([sys.executable, "-P", MOMENTS, end], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *stopped, too_late = json.loads(done.stdout)
    assert too_late[0] == code
    assert len(stopped) > 10
    assert {status for status, _ in stopped} == {7}
    assert all(re.fullmatch("error: interrupted; .*\n", said) for _, said in stopped)


STOPPED_IMPORT = """import os, signal
try:
    signal.raise_signal(signal.SIGTERM)
except BaseException:
    os.abort()  # as code in C++ does that calls Python and expects no exception
"""


def test_a_stop_while_torch_is_imported_raises_nothing_there(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(STOPPED_IMPORT)
    command = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['program']\n"
        "from mlm_repro.lineage.command import run_command\n"
        "run_command(lambda **_: __import__('torch'))"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, "")
    assert done.stderr.startswith("error: interrupted; ")


def wrong_while_it_starts(program: str, verb: str, place: Path) -> tuple[int, list[str]]:
    """How many copies of a verb were stopped while it imported what it needs, and what was not as
    it must be."""
    subprocess.run(
        [sys.executable, "-P", COPIES, place, BIN / program, verb, "--help"],
        cwd=place,
        check=True,
        capture_output=True,
        env=os.environ | {"PYTHONPATH": ""},
    )
    codes = [int(code) for code in (place / "codes").read_text(encoding="utf-8").split()]
    bad = []
    for number, code in enumerate(codes):
        path = place / str(number)
        said = path.read_text(encoding="utf-8") if path.is_file() else "it said nothing"
        if code not in DOCUMENTED or "Traceback" in said:
            bad.append(f"copy {number}: code {code}: {said[-900:]}")
    return len(codes), bad


def wrong_at_work(program: str, verb: str) -> tuple[int, list[str]]:
    """The same of a verb that does what `AT_WORK` says, in its first two seconds or until it has
    ended before a stop."""
    made, bad = 0, []
    for at in range(0, LAST_MS, EVERY_MS):
        stop = Stop(program, verb, at)
        with tempfile.TemporaryDirectory() as folder:
            (place := Path(folder, "place")).mkdir()
            said, has_ended = wrong(stop, place, start_forked)
        made += 1
        if said:
            bad.append(f"{stop}: {said}")
        if has_ended:
            break
    return made, bad


if __name__ == "__main__":
    failures, count = 0, 0
    verbs = [stop[:2] for stop in every_stop() if not stop.after_ms]
    for each in verbs:
        if "--all" not in sys.argv or not {*sys.argv[1:]} - {"--all"} <= {*each}:
            continue
        with tempfile.TemporaryDirectory() as folder:
            made, bad = wrong_while_it_starts(*each, Path(folder))
        if each in AT_WORK:
            more, worse = wrong_at_work(*each)
            made, bad = made + more, bad + worse
        failures, count = failures + len(bad), count + made
        print(f"{' '.join(each)}: {made - len(bad)} of {made}", *bad, sep="\n", flush=True)
    print(f"{count - failures} of {count} stops of {len(verbs)} verbs ended as documented")
    sys.exit(bool(failures))
