"""A command in this process or in one of its own: how it ended and what it said.

A process of its own is forked from one that has imported every command, so that a test does not
wait for imports. What a command imports, and how it starts from nothing, is tested where
`subprocess` is used.
"""

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlm_repro.lineage.errors import Fault

ROOT = Path(__file__).resolve().parent.parent
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.imported"])


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """Its last words, which must be one sentence."""
        sentence = self.err.strip().splitlines()[-1]
        assert sentence.startswith("error: "), self.err
        return sentence

    @property
    def but_cost(self) -> str:
        """What it said on standard error beside its cost."""
        return "".join(
            line for line in self.err.splitlines(keepends=True) if not line.startswith("cost: ")
        )


Command = Callable[..., Outcome]


class Program:
    """A command in a process of its own, which leads a session of its own; used as a
    `subprocess.Popen` is."""

    def __init__(
        self,
        name: str,
        *arguments: object,
        environment: Mapping[str, str] = os.environ,
        folder: Path = ROOT,
        prepare: Callable[[], object] | None = None,
    ) -> None:
        """Start it; `prepare` is called in its process first."""
        self.args = [name, *map(str, arguments)]
        self._output = tempfile.TemporaryDirectory(prefix="mlm-output-")
        self._files = [Path(self._output.name, file) for file in ("out", "err")]
        self._process = FORKED.Process(
            target=_run, args=(self.args, dict(environment), folder, self._files, prepare)
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """Its number."""
        assert self._process.pid
        return self._process.pid

    @property
    def cpu_seconds(self) -> float:
        """Processor time that it has taken, where there is a /proc."""
        user, system = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def interrupt_at(self, cpu_seconds: float, timeout: float) -> tuple[int, float]:
        """Send Ctrl-C once it has taken so much processor time: its exit code, and the processor
        time that it took from then on, which is the same where others use the machine."""
        while self.cpu_seconds < cpu_seconds:
            assert self.poll() is None, self.err
            time.sleep(0.1)
        self.send_signal(signal.SIGINT)
        began = taken = self.cpu_seconds
        end = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < end:
            with suppress(OSError):  # it has ended since
                taken = self.cpu_seconds
            time.sleep(0.02)
        try:
            return self.wait(0), taken - began
        finally:
            self.kill()

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it wrote to standard output and standard error until it ended. Raises
        subprocess.TimeoutExpired."""
        self.wait(timeout)
        return self.out, self.err

    @property
    def out(self) -> str:
        """What it has written to standard output."""
        return self._files[0].read_text(encoding="utf-8")

    @property
    def err(self) -> str:
        """What it has written to standard error."""
        return self._files[1].read_text(encoding="utf-8")

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def silence_end() -> None:
    """Close standard error when this process ends, before Triton's bindings list there what they
    still hold, pages that nobody can act on.

    Python calls the handler that was registered last first, so call it late.
    """
    atexit.register(os.dup2, os.open(os.devnull, os.O_WRONLY), 2)


def _run(
    arguments: list[str],
    environment: dict[str, str],
    folder: Path,
    files: list[Path],
    prepare: Callable[[], object] | None,
) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(files, 1):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    from tests.imported import COMMANDS

    sys.argv = arguments
    if prepare:
        prepare()
    COMMANDS[arguments[0]]()


def call(
    environment: Mapping[str, str],
    name: str,
    *arguments: object,
    folder: Path = ROOT,
    ends: int | None = None,
    prepare: Callable[[], object] | None = None,
) -> Outcome:
    """Run one of this package's commands as a process of its own with more variables; it may show
    no traceback.

    `ends` is the exit code it must have, where a test says one.
    """
    process = Program(
        name, *arguments, environment=os.environ | environment, folder=folder, prepare=prepare
    )
    try:
        out, err = process.communicate(600)
    finally:
        process.kill()
    assert "Traceback" not in err
    assert process.wait() != Fault.exit_code, err
    assert ends in (None, process.wait()), err
    return Outcome(process.wait(), out, err)
