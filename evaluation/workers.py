"""Independent pieces of work over forked processes of one thread each."""

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import TypeVar

import torch

from lineage.errors import UserError

T = TypeVar("T")


def in_workers(
    work: Callable[[int], T], items: Sequence[int], workers: int, one_thread: bool
) -> Iterator[tuple[int, T]]:
    """Yield `(item, work(item))` for every item, each as soon as it is there.

    With several workers, the items are dealt to the processes in turn. `one_thread` holds a single worker, which
    stays in this process, to the one thread the others have, so that the values do not depend on the number of
    workers.
    """
    workers = min(workers, len(items))
    if workers > 1:
        yield from _in_processes(work, items, workers)
        return
    with _threads(1 if one_thread else torch.get_num_threads()):
        for item in items:
            yield item, work(item)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _in_processes(work: Callable[[int], T], items: Sequence[int], workers: int) -> Iterator[tuple[int, T]]:
    context = multiprocessing.get_context("fork")
    processes, readers = [], []
    try:
        for worker in range(workers):
            share = items[worker::workers]
            reader, writer = context.Pipe(duplex=False)
            readers.append(reader)
            process = context.Process(target=_serve, args=(work, share, writer, list(readers)), daemon=True)
            process.start()
            writer.close()
            processes.append(process)
        open_readers = list(readers)
        while open_readers:
            ready = wait(open_readers)
            for reader in [reader for reader in open_readers if reader in ready]:
                try:
                    yield reader.recv()
                except EOFError:
                    open_readers.remove(reader)
        for process in processes:
            process.join()
            if process.exitcode:
                raise UserError(
                    f"a scoring worker ended with status {process.exitcode}; "
                    "if memory ran out, use a smaller --batch-size or fewer --workers"
                )
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _serve(work: Callable[[int], T], share: Sequence[int], writer: Connection, inherited: list[Connection]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for reader in inherited:
        reader.close()
    torch.set_num_threads(1)
    with suppress(BrokenPipeError):  # the parent was killed
        for item in share:
            writer.send((item, work(item)))
