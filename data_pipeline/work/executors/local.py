"""Tasks in processes of this machine. A process that is killed is replaced and its task repeated."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Self

from data_pipeline.work.tasks import Done, WorkTask, run_task
from lineage.environment import available_cores
from lineage.errors import Interrupted

ATTEMPTS = 3
"""A task is given up after it has lost this many processes."""
AHEAD = 4
"""Tasks that each process may finish before their turn."""


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    number: int | None = None
    """Number of the task in progress."""


class LocalExecutor:
    """Runs tasks in at most `count` processes, 0 meaning one for each core; with one, in this process itself.

    They are forked from a process that has imported the modules of `preload`.
    """

    def __init__(self, count: int = 0, preload: Sequence[str] = ()) -> None:
        self.count = count or available_cores()
        self._preload = preload
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        if self.count > 1:
            get_context("forkserver").set_forkserver_preload(["data_pipeline.pipeline", "datasketch", *self._preload])
            with _not_interrupted():
                forkserver.ensure_running()
        return self

    def __exit__(self, *error: object) -> None:
        self._end(self._workers)

    def run(self, tasks: Iterable[WorkTask], at_once: int | None = None) -> Iterator[Done]:
        """The tasks' results in order. Raises Interrupted for a task whose process is killed again and again."""
        count = min(self.count, at_once or self.count)
        if count == 1:
            yield from map(run_task, tasks)
            return
        coming = enumerate(tasks)
        given: dict[int, WorkTask] = {}
        finished: dict[int, Done] = {}
        losses: dict[int, int] = {}
        turn, exhausted = 0, False
        try:
            while True:
                for place in range(count):
                    is_idle = place >= len(self._workers) or self._workers[place].number is None
                    if is_idle and not exhausted and len(given) < AHEAD * count:
                        number, task = next(coming, (-1, None))
                        exhausted = task is None
                        if task is not None:
                            given[number] = task
                            self._give(place, number, task)
                if turn not in given:
                    return
                while turn not in finished:
                    self._collect(given, finished, losses)
                yield finished.pop(turn)
                del given[turn]
                turn += 1
        finally:
            self._end([worker for worker in self._workers if worker.number is not None])

    def _end(self, workers: list[_Worker]) -> None:
        """Kill processes and wait until they are gone, so that nothing writes to their files any more."""
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join()
        self._workers = [worker for worker in self._workers if worker not in workers]

    def _give(self, place: int, number: int, task: WorkTask) -> None:
        if place == len(self._workers):
            self._workers.append(_start())
        worker = self._workers[place]
        worker.number = number
        with contextlib.suppress(BrokenPipeError):  # its death is met when its answer is awaited
            worker.pipe.send(task)

    def _collect(self, given: dict[int, WorkTask], finished: dict[int, Done], losses: dict[int, int]) -> None:
        """Wait for at least one process to answer or to die."""
        places = {worker.pipe: place for place, worker in enumerate(self._workers) if worker.number is not None}
        for pipe in wait(list(places)):
            assert isinstance(pipe, Connection)
            place = places[pipe]
            number = self._workers[place].number
            assert number is not None
            try:
                answer = pipe.recv()
            except (EOFError, ConnectionResetError):
                losses[number] = losses.get(number, 0) + 1
                self._workers[place] = _start()
                if losses[number] == ATTEMPTS:
                    raise Interrupted(
                        f"the worker process at {given[number].output.name} was killed {ATTEMPTS} times, most often "
                        "for lack of memory; fewer --workers need less"
                    ) from None
                self._give(place, number, given[number])
                continue
            self._workers[place].number = None
            if isinstance(answer, BaseException):
                raise answer
            finished[number] = answer


def _start() -> _Worker:
    context = get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    with _not_interrupted():
        process.start()
    theirs.close()
    return _Worker(process, ours)


@contextlib.contextmanager
def _not_interrupted() -> Iterator[None]:
    """Start processes inside this block to keep Ctrl-C from them; only this process receives it."""
    resource_tracker.ensure_running()  # to start it lets Ctrl-C through again
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


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
