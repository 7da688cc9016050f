"""`python -m tests.fuzz N` damages valid files N times in all and reads them; results/fuzz.json says what came of it.

Every reader of outside files must give an answer or one of the documented errors (`lineage.errors`), within
CASE_SECONDS of processor time and GROWTH_BYTES of memory. Hypothesis chooses the damage and shrinks what fails.
"""

import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from lineage.atomic import write_json
from lineage.environment import describe_environment
from lineage.errors import UserError
from tests.architecture.rooms import ROOT
from tests.foreign_files import READERS, Reader

CASE_SECONDS = 5.0
GROWTH_BYTES = 256 << 20
SEED = 1909_08053
TOKEN = re.compile(rb'"[^"\n]*"|[\w.+-]+|[\[\]{}:,=\n]')
HOSTILE = (
    b"", b"\x00", b"\xff", b"\n", b"\r\n", b'"', b"{", b"}", b"null", b"true", b"[]", b"{}", b'""', b"-1", b"0", b"7",
    b"1e999", b"NaN", b"-Infinity", b"9" * 400, b"9" * 5000, b"0.5", b'"a"', b'"../x"', b'"/etc/passwd"',
    b'"\\ud800"', b'"\\u0000"', b"\xef\xbb\xbf", b"[" * 3000, b'{"a":' * 3000, b"a." * 3000 + b"a = 1\n",
    b"[[a]]\n", b'extends = "b\\u0000.toml"\n', b'extends = ""\n', b"x" * 70_000,
    b"\xff" * 4, b"\xff" * 8, b"\x00" * 8, b"\x00" * 7 + b"\x80", b"\xff" * 7 + b"\x7f", b"\x01" + b"\x00" * 7,
)  # fmt: skip
"""What is put in the place of a word, or of bytes: values of every other kind, and sizes that no file has."""


class TooLong(Exception):
    """A case took more than CASE_SECONDS."""


def damage(valid: bytes, script: bytes) -> bytes:
    """The bytes after the edits of a script, four bytes for each: what to do, where, and with what."""
    data = valid
    for kind, high, low, which in zip(*[iter(script)] * 4, strict=False):
        number, content = high << 8 | low, HOSTILE[which % len(HOSTILE)]
        words = [match.span() for match in TOKEN.finditer(data)]
        start, end = words[number % len(words)] if words and kind < 160 else (number % (len(data) + 1),) * 2
        match kind % 8:
            case 0 | 1 | 2:
                data = data[:start] + content + data[max(end, start + 1) :]
            case 3:
                data = data[:start] + content + data[start:]
            case 4:
                data = data[:start] + data[end + which % 16 :]
            case 5:
                data = data[:start]
            case 6:
                data = data[: start + 4 * which] + data[start:]
            case _:
                data = data[:start] + bytes([which]) + data[start + 1 :]
    return data


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


def fuzz(reader: Reader, cases: int, start: int = SEED) -> Counter[str]:
    """How often each answer came of `cases` damaged files. Raises what a reader must not raise, of the least damage."""
    answers: Counter[str] = Counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    old = signal.signal(signal.SIGPROF, stop)
    try:
        with tempfile.TemporaryDirectory() as folder:
            target = reader.prepare(Path(folder))
            valid = target.read_bytes()
            reader.read(target)

            @seed(start)
            @settings(max_examples=cases, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            @given(st.binary(min_size=4, max_size=16))
            def attempt(script: bytes) -> None:
                answers[answer(reader, target, damage(valid, script))] += 1

            attempt()
    finally:
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


def main(cases: int, out: Path) -> int:
    """Fuzz every reader with an equal share of the cases; the number of readers that failed."""
    began, found, failures = time.process_time(), {}, {}
    for reader in READERS:
        try:
            found[reader.name] = dict(sorted(fuzz(reader, -(-cases // len(READERS))).items()))
        except Exception as error:
            failures[reader.name] = f"{type(error).__name__}: {error}"
        print(reader.name, found.get(reader.name, failures.get(reader.name)), flush=True)
    spent = round(time.process_time() - began, 1)
    return write_record(out, found, failures, memory_growth_limit_bytes=GROWTH_BYTES, cpu_seconds=spent)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "results" / "fuzz.json"))
