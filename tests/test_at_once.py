"""Two commands that write to one place at once: nothing is mixed, nothing is lost, and one says why
it stopped."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

from mlm_repro.lineage.errors import Interrupted
from tests.chaos.faults import STRUCK, Fault, instrument
from tests.commands import Program, call
from tests.experiments.packed import unpack

VERBS = {
    "export": "mlm-train export runs/355m-tiny-387328e9 out/x",
    "oracle": "mlm-eval oracle --out out/x",
    "clean": "mlm-data clean jsonl:few.jsonl out/x --workers 1",
    "import": (
        "mlm-data import runs/tiny-1d71ab2f/train_text_document out/x --tokenizer"
        " runs/tiny-1d71ab2f/tokenizer"
    ),
    "score": "mlm-eval run cloze few.jsonl --ckpt runs/355m-tiny-387328e9 --json out/x",
    "samples": "mlm-eval run cloze few.jsonl --ckpt runs/355m-tiny-387328e9 --samples out/x",
    "generate": "mlm-eval generate --ckpt runs/355m-tiny-387328e9 --max-new-tokens 2 --json out/x",
    "simulate": "mlm-experiment simulate ptd-p-runs --out out/x",
    "launch": "mlm-experiment launch 355m --out out/x",
    "build": "mlm-report build runs --out out/x",
}
"""Commands by name, each with the place that all of them write to."""
PAIRS = [
    ("export", "export", 0),
    ("export", "clean", 1),
    ("clean", "import", 0),
    ("import", "clean", 2),
    ("oracle", "import", 0),
    ("import", "oracle", 1),
    ("oracle", "export", 1),
    ("score", "generate", 0),
    ("generate", "samples", 0),
    ("samples", "score", 0),
    ("simulate", "generate", 0),
    ("score", "oracle", 0),
    ("launch", "build", 0),
    ("clean", "launch", 0),
]
"""The first stands still at its change of that number while the second runs from beginning to
end."""


def stand_still(number: int, folder: Path) -> None:
    """Stop this process at a change below the folder."""
    instrument(folder, Fault("", 0, number, "other", "")).begin("")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = unpack(tmp_path_factory.mktemp("world"))
    (folder / "few.jsonl").write_text(
        '{"text": "the river walks over the old bridge and sleeps"}\n'
    )
    return folder


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture(scope="module")
def alone(world: Path) -> Callable[[str], list[str]]:
    """The files that a command makes where no other is."""

    @cache
    def made(name: str) -> list[str]:
        shutil.rmtree(world / "out", ignore_errors=True)
        (world / "out").mkdir()
        call({"MLM_QUIET": "1"}, *VERBS[name].split(), folder=world, ends=0)
        return files(world / "out")

    return made


@pytest.mark.parametrize(("first", "second", "number"), PAIRS)
def test_of_two_that_write_to_one_place_one_has_it_and_one_says_why(
    first: str, second: str, number: int, world: Path, alone: Callable[[str], list[str]]
) -> None:
    out = world / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    (world / STRUCK).unlink(missing_ok=True)
    start = partial(Program, folder=world, environment=os.environ | {"MLM_QUIET": "1"})
    held = start(*VERBS[first].split(), prepare=partial(stand_still, number, out))
    try:
        while not (world / STRUCK).exists():
            assert held.poll() is None, held.err
            time.sleep(0.01)
        other = start(*VERBS[second].split())
        other.wait(300)
        held.send_signal(signal.SIGCONT)
        held.wait(300)
    finally:
        held.kill()
    ends = {first: held.wait(), f"{second} beside it": other.wait()}
    has_it, stopped = (held, other) if held.wait() == 0 else (other, held)
    assert has_it.wait() == 0, (ends, held.err, other.err)
    assert stopped.wait() in (2, Interrupted.exit_code), (ends, stopped.err)
    assert stopped.err.startswith("error: "), stopped.err
    assert stopped.err.count("\n") == 1, stopped.err
    made = files(out)
    assert made == alone(first if has_it is held else second)
