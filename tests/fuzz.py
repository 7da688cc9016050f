"""Damages valid files and reads them.

Every reader of outside files must give an answer or one of the documented errors
(`mlm_repro.lineage.errors`), within CASE_SECONDS of processor time and GROWTH_BYTES more memory.
Hypothesis chooses the damage and shrinks a failing case. `python -m tests.fuzz TIMES` reads TIMES
the files of every reader's share and prints the answers.
"""

import json
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from mlm_repro.lineage.errors import UserError
from tests.damage import damage
from tests.reader import Reader

CASE_SECONDS = 5.0
GROWTH_BYTES = 256 << 20
SEED = 1909_08053


class TooLong(Exception):
    """A case took more than CASE_SECONDS."""


@contextmanager
def limited() -> Iterator[None]:
    """Raise TooLong in what takes more than CASE_SECONDS of processor time."""
    signal.setitimer(signal.ITIMER_PROF, CASE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def stop(number: int, frame: object) -> None:
    raise TooLong(f"more than {CASE_SECONDS} s")


def answer(reader: Reader, target: Path, content: bytes) -> str:
    """What comes of reading a file with that content: "read" or the name of a documented error.
    Raises any other."""
    target.write_bytes(content)
    with limited():
        try:
            reader.read(target)
        except UserError as error:
            return type(error).__name__
    return "read"


def fuzz(reader: Reader, cases: int) -> Counter[str]:
    """Count the answers to `cases` damaged files. Raises an error of a reader that is not
    documented."""
    answers: Counter[str] = Counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    old = signal.signal(signal.SIGPROF, stop)
    try:
        with tempfile.TemporaryDirectory() as folder:
            target = reader.prepare(Path(folder))
            valid = target.read_bytes()
            reader.read(target)

            @seed(SEED)
            @settings(
                max_examples=cases,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(st.binary(min_size=4, max_size=16))
            def attempt(script: bytes) -> None:
                answers[answer(reader, target, damage(valid, script, reader.form))] += 1

            attempt()
    finally:
        signal.signal(signal.SIGPROF, old)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10
    assert grown < GROWTH_BYTES, f"{reader.name}: {grown:,} bytes more"
    return answers


if __name__ == "__main__":
    from tests.foreign_files import READERS

    answers = {
        reader.name: dict(fuzz(reader, int(sys.argv[1]) * reader.cases)) for reader in READERS
    }
    files = sum(sum(each.values()) for each in answers.values())
    print(
        json.dumps(
            {"command": f"python -m tests.fuzz {sys.argv[1]}", "files": files, "answers": answers},
            indent=2,
        )
    )
