"""How processes end: with the one that started them, when they are asked to, and beside threads of native code."""

import ctypes
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
NATIVE = "native"


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """On Linux, send this process the signal `number` when its parent ends, however that ends; elsewhere nothing."""
    if LIBC:
        LIBC.prctl(PR_SET_PDEATHSIG, number)


@contextmanager
def when_stopped(handler: Callable[[int], None]) -> Iterator[None]:
    """SIGTERM and Ctrl-C call `handler` with the signal's number; at the end they do again what they did before.

    Only the main thread can change what a signal does; in another thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = signal.SIGTERM, signal.SIGINT
    former = {number: signal.signal(number, lambda number, frame: handler(number)) for number in numbers}
    try:
        yield
    finally:
        for number, before in former.items():
            signal.signal(number, before)


def heard(call: Callable[[], T]) -> T:
    """What the call gives. It is made in a thread, as a signal waits for what the main thread computes natively."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # it is raised where the answer is waited for
            answer.set_exception(error)

    threading.Thread(target=work, name=NATIVE, daemon=True).start()
    return answer.result()


def is_at_work() -> bool:
    """Whether such a thread has been left alone. The interpreter's own end can abort the process where it then ends."""
    return any(thread.name == NATIVE for thread in threading.enumerate())
