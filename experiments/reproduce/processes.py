"""The commands of a reproduction as processes."""

import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from lineage.errors import Interrupted, UserError
from lineage.processes import end_with_parent, when_stopped
from lineage.progress import is_quiet


class StepFailed(UserError):
    """A command of the sequence failed; its own sentence stands above and its exit code is passed on."""

    def __init__(self, command: str, exit_code: int) -> None:
        super().__init__(f"`{command}` ended with exit code {exit_code}; what was finished before it is kept")
        self.exit_code = exit_code


def run_step(program: str, *arguments: str) -> None:
    """Run a command of this suite, or of the system, and print it first. Raises StepFailed if it failed.

    If this process is killed, the step is stopped as by SIGTERM: one that trains leaves a checkpoint.
    """
    shown = shlex.join([program, *arguments])
    if not is_quiet():
        print(f"\n$ {shown}", flush=True)
    process = subprocess.Popen([_found(program), *arguments], preexec_fn=partial(end_with_parent, signal.SIGTERM))
    with _stops_left_to(process) as stopped:
        code = process.wait()
    if code:
        raise StepFailed(shown, code if code > 0 else 1)
    if stopped:
        raise Interrupted(f"stopped after `{shown}`; the same command continues from there")


def _found(program: str) -> str:
    """This environment's command of that name, or the system's."""
    own = Path(sys.executable).with_name(program)
    return str(own) if own.is_file() else program


@contextmanager
def _stops_left_to(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Let a step end by itself, with a checkpoint if it trains: a terminal sends it Ctrl-C too, SIGTERM is passed on.

    Yields the signals that came.
    """
    stopped: list[int] = []

    def leave(number: int) -> None:
        stopped.append(number)
        if number == signal.SIGTERM and process.poll() is None:
            process.send_signal(signal.SIGINT)

    with when_stopped(leave):
        yield stopped
