"""Runs tasks in processes of this machine. Killed processes are replaced and their tasks
repeated."""

import contextlib
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import (
    active_children,
    forkserver,
    get_context,
    parent_process,
    resource_tracker,
)
from typing import Self

from mlm_repro.data_pipeline.work.tasks import Done, WorkTask, run_task
from mlm_repro.lineage.environment import available_cores
from mlm_repro.lineage.errors import Interrupted
from mlm_repro.lineage.processes import held_back

ATTEMPTS = 3
"""Number of times that processes may be lost, while no task finishes in between, before the work is
given up."""
PRELOADED = ("mlm_repro.data_pipeline.pipeline",)
AHEAD = 4
"""Number of tasks that each process may finish before their results are taken."""


class LocalExecutor:
    """Context manager whose method `run` runs tasks in at most `count` processes, 0 meaning one for
    each core, and yields the tasks' results in order. With one, tasks run in this process itself.

    The processes are forked from a server that has imported PRELOADED and the modules `preload`.
    It is started when the object is made, so that it imports them while this process does other
    work. The processes are killed when the block ends.
    """

    def __init__(self, count: int = 0, preload: Sequence[str] = ()) -> None:
        self.count = count or available_cores()
        self._pool: ProcessPoolExecutor | None = None
        if self.count > 1:
            get_context("forkserver").set_forkserver_preload([*PRELOADED, *preload])
            with _not_interrupted():
                forkserver.ensure_running()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def run(self, tasks: Iterable[WorkTask], at_once: int | None = None) -> Iterator[Done]:
        """Run the tasks and yield the result of each, a Done, in order; at most `at_once` tasks are
        in work at a time, if that is given. Tasks run in this process if `at_once` or the attribute
        `count` is 1. Raises Interrupted if processes are killed ATTEMPTS times in a row. Errors of
        the tasks are passed on."""
        if 1 in (self.count, at_once):
            yield from map(run_task, tasks)
            return
        coming = iter(tasks)
        given = deque[tuple[WorkTask, Future[Done]]]()
        losses = 0
        try:
            while True:
                room = (at_once or AHEAD * self.count) - len(given)
                given.extend((task, self._submit(task)) for task in islice(coming, room))
                if not given:
                    return
                try:
                    done = given[0][1].result()
                except BrokenProcessPool as error:
                    losses += 1
                    if losses == ATTEMPTS:
                        raise Interrupted(
                            f"worker processes were killed {ATTEMPTS} times in a row before task"
                            f" {given[0][0].output.name} was finished, most often for lack of"
                            " memory; run the same command with fewer --workers, and it continues"
                            " from what was finished"
                        ) from error
                    self._end()
                    given = deque(
                        (task, future if _is_done(future) else self._submit(task))
                        for task, future in given
                    )
                    continue
                given.popleft()
                losses = 0
                yield done
        finally:
            if given:
                self._end()

    def _submit(self, task: WorkTask) -> "Future[Done]":
        """Give a task to the pool of processes and return the Future of its Done. The pool is
        started for the first task and replaced if it is broken."""
        with _not_interrupted():
            self._pool = self._pool or ProcessPoolExecutor(
                self.count, get_context("forkserver"), _watch_parent
            )
            try:
                return self._pool.submit(run_task, task)
            except BrokenProcessPool:
                self._end()
                return self._submit(task)

    def _end(self) -> None:
        """End the pool, if there is one: kill all processes that multiprocessing started from this
        one, and wait until they are gone, so that none still writes files. Tasks that wait in the
        pool are cancelled; the next task starts a new pool."""
        if self._pool:
            for process in active_children():
                process.kill()
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _is_done(future: "Future[Done]") -> bool:
    return future.done() and future.exception() is None


@contextlib.contextmanager
def _not_interrupted() -> Iterator[None]:
    """Context manager: keep Ctrl-C from the processes that are started in the block; only this
    process receives it, at the end of the block if it comes during it."""
    resource_tracker.ensure_running()  # started in the block, it would unblock Ctrl-C
    with held_back({signal.SIGINT}):
        yield


def _watch_parent() -> None:
    """Start a thread that ends this process when its parent has ended."""
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    if parent := parent_process():
        parent.join()
        os._exit(1)
