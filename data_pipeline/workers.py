"""A pool of worker processes whose results do not depend on how many there are."""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_context, parent_process
from types import TracebackType
from typing import Self, TypeVar

from lineage.environment import available_cores
from lineage.errors import Interrupted

T = TypeVar("T")
R = TypeVar("R")


class Workers:
    """`count` processes (0: one for each core); one worker is this process itself."""

    def __init__(self, count: int = 0) -> None:
        self.count = count or available_cores()
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        if self.count > 1:
            self._pool = ProcessPoolExecutor(self.count, get_context("spawn"), _start_worker)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def map(self, function: Callable[[T], R], items: Iterable[T], chunk: int = 64) -> Iterator[R]:
        """`function` of each item, in order; `items` is read only a few chunks ahead.

        `function` must be importable. Raises Interrupted if a worker is killed.
        """
        if self._pool is None:
            yield from map(function, items)
            return
        iterator = iter(items)
        pending: deque[Future[list[R]]] = deque()
        try:
            while True:
                while len(pending) < 4 * self.count and (batch := list(islice(iterator, chunk))):
                    pending.append(self._pool.submit(_apply, function, batch))
                if not pending:
                    return
                yield from pending.popleft().result()
        except BrokenProcessPool as error:
            raise Interrupted(
                "a worker process was killed, most often for lack of memory; fewer --workers need less"
            ) from error


def _apply(function: Callable[[T], R], batch: list[T]) -> list[R]:
    return [function(item) for item in batch]


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    if parent := parent_process():
        parent.join()
        os._exit(1)
