"""Tasks in processes of this machine. A process that is killed is replaced and its task repeated."""

import contextlib
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple, Self

from data_pipeline.work.tasks import Done, Task, run_task
from lineage.environment import available_cores
from lineage.errors import Interrupted

ATTEMPTS = 3
"""A task that costs so many processes is given up."""
AHEAD = 4
"""Tasks that may be finished before their turn, for each process."""


class _Worker(NamedTuple):
    process: BaseProcess
    pipe: Connection


class LocalExecutor:
    """`count` processes (0: one for each core), each with a thread that waits for it."""

    def __init__(self, count: int = 0) -> None:
        self.count = count or available_cores()
        self._idle: list[_Worker] = []
        self._busy: list[_Worker] = []
        self._is_ending = False
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        _kill(self._idle)

    def run(self, tasks: Iterable[Task], at_once: int | None = None) -> Iterator[Done]:
        """The tasks' results in order. Raises Interrupted for a task whose process is killed again and again."""
        count = min(self.count, at_once or self.count)
        if count == 1:
            yield from map(run_task, tasks)
            return
        coming = iter(tasks)
        threads = ThreadPoolExecutor(count)
        try:
            given: deque[Future[Done]] = deque()
            while True:
                given.extend(threads.submit(self._do, task) for task in islice(coming, AHEAD * count - len(given)))
                if not given:
                    return
                yield given.popleft().result()
        finally:
            with self._lock:
                self._is_ending = True
                _kill(self._busy)
            threads.shutdown(cancel_futures=True)
            self._is_ending = False

    def _do(self, task: Task) -> Done:
        for _ in range(ATTEMPTS):
            with self._lock:
                if self._is_ending:
                    break
                worker = self._idle.pop() if self._idle else _start()
                self._busy.append(worker)
            try:
                worker.pipe.send(task)
                answer: Done | BaseException = worker.pipe.recv()
            except (EOFError, ConnectionError):  # it was killed
                self._busy.remove(worker)
                continue
            self._busy.remove(worker)
            self._idle.append(worker)
            if isinstance(answer, BaseException):
                raise answer
            return answer
        raise Interrupted(
            f"the worker process at {task.output.name} was killed {ATTEMPTS} times, most often for lack of memory; "
            "fewer --workers need less"
        )


def _kill(workers: list[_Worker]) -> None:
    """Kill processes, and wait until they are gone: what they leave is no longer written to."""
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join()


def _start() -> _Worker:
    context = get_context("forkserver")
    context.set_forkserver_preload(["data_pipeline.pipeline"])  # imported once for all of them
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    resource_tracker.ensure_running()  # to start it lets Ctrl-C through again
    held = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT}
    )  # Ctrl-C is for this process; the new one inherits it
    process.start()
    signal.pthread_sigmask(signal.SIG_SETMASK, held)
    theirs.close()
    return _Worker(process, ours)


def _serve(pipe: Connection) -> None:
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):  # the other process has ended
        while True:
            task = pipe.recv()
            try:
                answer: Done | BaseException = run_task(task)
            except Exception as error:
                answer = error
            pipe.send(answer)


def _die_with_parent() -> None:
    if parent := parent_process():
        parent.join()
        os._exit(1)
