"""The end of processes: with their parent, on a signal, and beside threads of native code."""

import ctypes
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from mlm_repro.lineage.errors import STOPS

T = TypeVar("T")
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
NATIVE = "native"


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Send this process the signal `number` when its parent ends; only Linux can."""
    if LIBC:
        LIBC.prctl(PR_SET_PDEATHSIG, number)


@contextmanager
def when_stopped(handler: Callable[[int], None]) -> Iterator[None]:
    """Call `handler` with the number of the first of STOPS; restore the former handlers at the end.

    Only the main thread can set signal handlers; in another thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def hear(number: int, frame: object) -> None:
        came.append(number)
        if len(came) == 1:
            handler(number)

    numbers = [number for number in STOPS if signal.getsignal(number) != signal.SIG_IGN]
    former = {number: signal.signal(number, hear) for number in numbers}
    try:
        yield
    finally:
        for number, before in former.items():
            signal.signal(number, before)


def heard(call: Callable[[], T]) -> T:
    """Call in a thread and return the result, because native code in the main thread would delay a signal."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # raised where the result is awaited
            answer.set_exception(error)

    threading.Thread(target=work, name=NATIVE, daemon=True).start()
    return answer.result()


def is_at_work() -> bool:
    """True if a thread of `heard` is still running: the interpreter's own end could then abort the process."""
    return any(thread.name == NATIVE for thread in threading.enumerate())
