"""What a process does when it is asked to stop."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def when_stopped(handler: Callable[[int], None]) -> Iterator[None]:
    """SIGTERM and Ctrl-C call `handler` with the signal's number; at the end they do again what they did before."""
    numbers = signal.SIGTERM, signal.SIGINT
    former = {number: signal.signal(number, lambda number, frame: handler(number)) for number in numbers}
    try:
        yield
    finally:
        for number, before in former.items():
            signal.signal(number, before)
