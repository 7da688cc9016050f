"""Stop signals, the start of child processes, and the meaning of the status that a child ends
with."""

import ctypes
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from mlm_repro.lineage.errors import STOPS, Fault, Interrupted, UserError

T = TypeVar("T")
PR_SET_PDEATHSIG = 1
"""Number of the prctl option of Linux by which a process asks for a signal when its parent ends;
Python has no name for it."""
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Let this process be sent the signal `number`, by default SIGKILL, when its parent ends, more
    exactly the thread that started this process: start it from a thread that outlives it. If the
    parent ended before this call, no signal comes. Does nothing except on Linux."""
    if LIBC:
        LIBC.prctl(PR_SET_PDEATHSIG, number)


@contextmanager
def held_back(numbers: Collection[int] = STOPS) -> Iterator[None]:
    """Context manager: block the signals `numbers`, by default the stop signals, during the `with`
    block. A process that is started in the `with` block keeps them blocked until it calls
    `hear_stops`.

    A child that is stopped before its handlers are set would otherwise end with a traceback, or by
    the signal.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def hear_stops() -> None:
    """Unblock the stop signals. Call it when this process has set its handlers; signals that waited
    arrive at once."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def exit_code_of(status: int, stopped: bool = False) -> int:
    """Return the documented exit code for `status`, a child process's exit code or, if a signal
    ended it, a number that is negative or above 128.

    0 and the documented codes are returned as they are. A signal gives the code of Interrupted, and
    so does any undocumented status if this process was `stopped`; another undocumented status gives
    the code of Fault.
    """
    if status in {0, *(error.exit_code for error in UserError.__subclasses__())}:
        return status
    # A shell reports a signal as 128 and its number, Python as the negative number.
    return Interrupted.exit_code if stopped or status < 0 or status > 128 else Fault.exit_code


def ended_by(status: int) -> str:
    """Return the words for how a child process ended, by its status as Python gives it: `was ended
    by SIGKILL`, with the signal's name, if the status is negative, else `ended with exit code 3`,
    with the status."""
    return (
        f"was ended by {signal.Signals(-status).name}"
        if status < 0
        else f"ended with exit code {status}"
    )


@contextmanager
def when_stopped(handler: Callable[[int], None]) -> Iterator[None]:
    """Context manager: call `handler` once, with the number of the first stop signal that comes
    during the block; later ones do nothing. A stop signal that this process ignores stays ignored.
    Restore the former handlers at the end of the block.

    Only the main thread can set signal handlers; in another thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = []

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
    """Run `call` in a thread, wait for it and return its result, because native code in the main
    thread would delay a signal. An exception of `call` is raised here. If a signal's handler raises
    an exception meanwhile, the thread goes on by itself."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        # `result` raises it in the waiting thread.
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return answer.result()
