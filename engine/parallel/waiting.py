"""How long a rank waits. Imports no torch."""

import time


class Waiting:
    """Seconds that this rank has spent in communication, which on CPUs is mostly waiting for the others."""

    def __init__(self) -> None:
        self.seconds, self._start = 0.0, 0.0

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, *failure: object) -> None:
        self.seconds += time.monotonic() - self._start
