"""SIGTERM in the first two seconds of every verb: a documented code, no traceback, and what was
there stays as it was.

`python -m tests.lineage.test_stops --all` stops each verb every 10 ms, as long as it lasts; the
suite draws some by a seed.
"""

import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

import pytest

from mlm_repro.lineage.digest import MARKER, check_seal
from mlm_repro.lineage.errors import UserError
from tests.experiments.packed import unpack

BIN = Path(sys.executable).parent
PROGRAMS = ("mlm-data", "mlm-train", "mlm-eval", "mlm-experiment", "mlm-report", "mlm-verify")
EVERY_MS, LAST_MS = 10, 2000
AT_WORK = {
    ("mlm-data", "clean"): "text:texts out",
    ("mlm-train", "resume"): "RUN",
    ("mlm-report", "run"): "RUN",
    ("mlm-train", "run"): "355m --twin --dry-run",
    ("mlm-experiment", "simulate"): "2021/figure-6",
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


def wrong(stop: Stop, place: Path) -> tuple[str, bool]:
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
    process = subprocess.Popen(
        [BIN / stop.program, stop.verb, *words],
        cwd=place,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with suppress(subprocess.TimeoutExpired):
        process.wait(stop.after_ms / 1000)
    has_ended = process.poll() is not None
    process.terminate()
    out, err = process.communicate(timeout=300)
    lost = [
        path.name
        for path, content in before.items()
        if not path.is_file() or path.read_bytes() != content
    ]
    said = ""
    if process.returncode not in DOCUMENTED:
        said = f"code {process.returncode}: {err[-300:]}"
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


if __name__ == "__main__":
    chosen = list(every_stop())
    if "--all" not in sys.argv:
        chosen = random.Random(0).sample(chosen, 50)
    failures, made, over = 0, 0, set[tuple[str, str]]()
    for each in chosen:
        if each[:2] in over:  # a later stop meets no process
            continue
        with tempfile.TemporaryDirectory() as folder:
            said, has_ended = wrong(each, Path(folder))
        made += 1
        if has_ended and "--all" in sys.argv:
            over.add((each.program, each.verb))
        if said:
            failures += 1
            print(f"{each}: {said}", flush=True)
    print(f"{made - failures} of {made} stops ended as documented")
    sys.exit(bool(failures))
