"""Native code that takes long, beside which Ctrl-C is heard."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
NAME = "native"


def heard(call: Callable[[], T]) -> T:
    """What the call gives. It is made in a thread, as a signal waits for what the main thread computes natively."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # it is raised where the answer is waited for
            answer.set_exception(error)

    threading.Thread(target=work, name=NAME, daemon=True).start()
    return answer.result()


def is_at_work() -> bool:
    """Whether such a thread has been left alone. The interpreter's own end can abort the process where it then ends."""
    return any(thread.name == NAME for thread in threading.enumerate())
