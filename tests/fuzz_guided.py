"""`python -m tests.fuzz_guided N` has atheris, which follows the code that an input reaches, damage files for N cases.

As in `tests.fuzz`, every reader must give an answer or one of the documented errors, within CASE_SECONDS and a bound of
memory; each is tried in a process of its own, starting from its valid file. It needs the extra `fuzz`;
results/fuzz-guided.json says what came of it.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import atheris
import orjson

with atheris.instrument_imports(
    include=["data_pipeline.reading", "data_pipeline.tokens", "engine", "lineage", "reports"]
):
    from tests.architecture.rooms import ROOT
    from tests.foreign_files import READERS
    from tests.fuzz import SEED, answer, stop, write_record

MEMORY_MEGABYTES = 2048
"""Most a process may hold, libraries and the fuzzer's own tables included."""
LONGEST = 4096
"""Bytes of an input; a valid file may be longer."""


def fuzz(name: str, cases: int, out: Path) -> None:
    """Try one reader and write how often each answer came; the process ends with it, or with a fault's traceback."""
    [reader] = [one for one in READERS if one.name == name]
    answers: Counter[str] = Counter()
    folder = Path(tempfile.mkdtemp(dir=out.parent))
    target = reader.prepare(folder)
    valid = target.read_bytes()
    seeds = out.parent / "seeds"
    seeds.mkdir()
    (seeds / "valid").write_bytes(valid)

    def attempt(data: bytes) -> None:
        answers[answer(reader, target, data)] += 1
        if answers.total() >= cases:
            out.write_bytes(orjson.dumps(answers))
            os._exit(0)

    limits = [f"-rss_limit_mb={MEMORY_MEGABYTES}", f"-max_len={max(LONGEST, 2 * len(valid))}", f"-seed={SEED % 2**31}"]
    atheris.Setup(["fuzz", *limits, str(seeds)], attempt)
    signal.signal(signal.SIGPROF, stop)
    atheris.Fuzz()


def main(cases: int, out: Path) -> int:
    """Fuzz every reader with an equal share of the cases; the number of readers that failed."""
    began, found, failures = time.monotonic(), {}, {}
    for reader in READERS:
        with tempfile.TemporaryDirectory() as folder:
            answers = Path(folder) / "answers.json"
            share = str(-(-cases // len(READERS)))
            command = [sys.executable, "-m", "tests.fuzz_guided", reader.name, share, str(answers)]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=ROOT, check=False)
            if answers.exists():
                found[reader.name] = dict(sorted(orjson.loads(answers.read_bytes()).items()))
            else:
                failures[reader.name] = "\n".join(done.stderr.splitlines()[-20:])
        print(reader.name, found.get(reader.name, failures.get(reader.name)), flush=True)
    spent = round(time.monotonic() - began, 1)
    return write_record(out, found, failures, memory_limit_bytes=MEMORY_MEGABYTES << 20, seconds=spent)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        fuzz(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    sys.exit(main(int(sys.argv[1]), ROOT / "results" / "fuzz-guided.json"))
