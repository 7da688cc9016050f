"""The processes below a command, as /proc shows them, and holding all of them still."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def tree(process: int) -> Iterator[int]:
    """A process and all below it."""
    yield process
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, task.read_text().split()):
                yield from tree(child)


def state(process: int) -> str:
    """Its state as one letter: `T` if it is stopped, `Z` if it has ended, also if it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return "Z"


def is_running(process: int) -> bool:
    """True if a process with this id is running."""
    return state(process) != "Z"


def is_told(process: int, *signals: int) -> bool:
    """True if one of the signals waits for this process, which stands still."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("ShdPnd:"):
                waiting = int(line.split()[1], 16)
                return any(waiting & 1 << number - 1 for number in signals)
    return False


def tell(processes: list[int], number: int) -> None:
    """Send a signal to those that are still there."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def hold(process: int, timeout_seconds: float = 60) -> list[int]:
    """Stop a process and all below it, in whatever group or session, and return them once each of
    them stands still. A signal alone is not enough: who has it runs on until the kernel acts."""
    deadline = time.monotonic() + timeout_seconds
    while moving := [each for each in tree(process) if state(each) not in "TZ"]:
        assert time.monotonic() < deadline, moving
        tell(moving, signal.SIGSTOP)
        time.sleep(0.0005)
    return list(tree(process))
