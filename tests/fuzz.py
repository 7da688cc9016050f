"""`python -m tests.fuzz N` damages valid files N times in all and reads them; results/fuzz.json says what came of it.

Every reader of outside files must give an answer or one of the documented errors (`lineage.errors`), within
CASE_SECONDS of processor time and GROWTH_BYTES more memory. Each reader has a process of its own, which the system ends
when a case takes LOST_SECONDS, and which gets no more than MEMORY_BYTES. Hypothesis chooses the damage and shrinks what
fails.
"""

import argparse
import math
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from lineage.atomic import write_json
from lineage.environment import describe_environment
from lineage.errors import UserError
from tests.architecture.rooms import ROOT
from tests.damage import damage
from tests.foreign_files import READERS
from tests.reader import Reader

CASE_SECONDS = 5.0
LOST_SECONDS = 60
"""By the clock, where nothing is computed or what computes is deaf."""
MEMORY_BYTES = 3 << 30
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
    """What comes of reading a file with that content: "read" or the name of a documented error. Raises any other."""
    target.write_bytes(content)
    with limited():
        try:
            reader.read(target)
        except UserError as error:
            return type(error).__name__
    return "read"


def fuzz(reader: Reader, cases: int, lost_seconds: int = 0) -> Counter[str]:
    """How often each answer came of `cases` damaged files. Raises what a reader must not raise, of the least damage.

    With `lost_seconds` the system ends this process where a case takes so long.
    """
    answers: Counter[str] = Counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    old = signal.signal(signal.SIGPROF, stop)
    try:
        with tempfile.TemporaryDirectory() as folder:
            target = reader.prepare(Path(folder))
            valid = target.read_bytes()
            reader.read(target)

            @seed(SEED)
            @settings(max_examples=cases, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            @given(st.binary(min_size=4, max_size=16))
            def attempt(script: bytes) -> None:
                signal.alarm(lost_seconds)
                answers[answer(reader, target, damage(valid, script, reader.form))] += 1

            attempt()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGPROF, old)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10
    assert grown < GROWTH_BYTES, f"{reader.name}: {grown:,} bytes more"
    return answers


def write_record(out: Path, found: dict[str, Any], failures: dict[str, str], **values: Any) -> int:
    """Write the answers of every reader; the number of readers that failed."""
    record = {
        "cases": sum(sum(answers.values()) for answers in found.values()),
        "readers": found,
        "failures": failures,
        "seed": SEED,
        "case_seconds_limit": CASE_SECONDS,
    }
    write_json(out, record | values | {"environment": describe_environment()})
    return len(failures)


def fuzz_alone(reader: Reader, cases: int) -> tuple[dict[str, int], str]:
    """As `fuzz`, in a process of its own: the answers, or in words what ended it."""
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        with tempfile.TemporaryDirectory() as cache:
            os.environ["XDG_CACHE_HOME"] = cache
            try:
                theirs.send((dict(sorted(fuzz(reader, cases, lost_seconds=LOST_SECONDS).items())), ""))
            except Exception as error:
                theirs.send(({}, "".join(traceback.format_exception(error))[-3000:]))

    process = context.Process(target=work)
    process.start()
    theirs.close()
    try:
        return ours.recv()  # type: ignore[no-any-return]
    except EOFError:
        process.join()
        return {}, f"its process ended with {process.exitcode}"
    finally:
        process.join()


def main(cases: int, out: Path, only: str) -> int:
    """Fuzz the readers whose names have `only` in them, by their shares; the number of readers that failed."""
    began, found, failures = time.monotonic(), {}, {}
    readers = [reader for reader in READERS if only in reader.name]
    share = cases / sum(reader.cases for reader in readers)
    for reader in readers:
        answers, failure = fuzz_alone(reader, math.ceil(share * reader.cases))
        if failure:
            failures[reader.name] = failure
        else:
            found[reader.name] = answers
        print(f"{time.monotonic() - began:.0f} s: {reader.name}: {failure or answers}", flush=True)
    limits = {"memory_limit_bytes": MEMORY_BYTES, "memory_growth_limit_bytes": GROWTH_BYTES}
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return write_record(
        out, found, failures, **limits, lost_seconds_limit=LOST_SECONDS,
        cpu_seconds=round(spent.ru_utime + spent.ru_stime, 1),
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=int)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "fuzz.json")
    parser.add_argument("--only", default="", help="Part of the names of readers.")
    asked = parser.parse_args()
    sys.exit(main(asked.cases, asked.out, asked.only))
