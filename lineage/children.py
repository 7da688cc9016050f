"""Processes that do not outlive the one that started them."""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """On Linux, send this process the signal `number` when its parent ends, however that ends; elsewhere nothing."""
    if LIBC:
        LIBC.prctl(PR_SET_PDEATHSIG, number)
