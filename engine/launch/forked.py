"""Runs a function on gloo ranks in forked processes of this machine, over a file rendezvous, with a hard timeout.

The ranks inherit the parent's imports and memory without a copy. CPUs only, one thread per rank; on Linux the ranks do
not outlive the parent.
"""

import faulthandler
import multiprocessing
import queue
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from engine.launch.local import become_rank
from engine.launch.threads import RanksFailed

GRACE_SECONDS = 5.0


class _Answer(NamedTuple):
    """Result or failure of one rank."""

    rank: int
    value: Any
    failure: tuple[float, str, str] | None
    """Time of the failure, the failure in one line, and its traceback."""


def run_forked(function: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 300.0) -> list[Any]:
    """Call `function(*args)` on each rank; returns the results in rank order.

    Raises RanksFailed when a rank fails; the others are then ended. On a timeout every rank prints its stack.
    """
    context = multiprocessing.get_context("fork")
    answers: Queue[_Answer] = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_enter, args=(rank, world_size, Path(folder) / "store", timeout_seconds, answers, function, args)
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        answered: list[_Answer] = []
        try:
            answered = _collect(answers, processes, timeout_seconds + GRACE_SECONDS)
        finally:
            for process in processes:
                process.join(GRACE_SECONDS if len(answered) == world_size else 0)
                if process.is_alive():
                    process.kill()
                    process.join()
    failures = sorted((answer.failure, answer.rank) for answer in answered if answer.failure)
    if failures:
        (_, line, text), rank = failures[0]
        raise RanksFailed(f"rank {rank} failed: {line}", text)
    if len(answered) < world_size:
        silent = sorted(set(range(world_size)) - {answer.rank for answer in answered})
        raise RanksFailed(f"rank {silent[0]} did not answer within {timeout_seconds:.0f} s", "")
    return [answer.value for answer in sorted(answered, key=lambda answer: answer.rank)]


def _collect(answers: "Queue[_Answer]", processes: list[Any], timeout_seconds: float) -> list[_Answer]:
    """Collect every rank's answer; after a first failure or death, only those that follow at once."""
    deadline = time.monotonic() + timeout_seconds
    answered: list[_Answer] = []
    is_cut = False
    while len(answered) < len(processes) and time.monotonic() < deadline:
        try:
            answer = answers.get(timeout=min(0.2, max(deadline - time.monotonic(), 0.01)))
        except queue.Empty:
            failed = any(process.exitcode not in (None, 0) for process in processes)
        else:
            answered.append(answer)
            failed = answer.failure is not None
        if failed and not is_cut:
            is_cut, deadline = True, min(deadline, time.monotonic() + GRACE_SECONDS)
    return answered


def _enter(
    rank: int, world_size: int, store: Path, timeout_seconds: float, answers: "Queue[_Answer]",
    function: Callable[..., Any], args: tuple[Any, ...],
) -> None:  # fmt: skip
    become_rank(rank, {"WORLD_SIZE": str(world_size), "CUDA_VISIBLE_DEVICES": ""})
    faulthandler.dump_traceback_later(timeout_seconds, exit=True)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    try:
        if world_size > 1:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
            dist.barrier()  # a rank that ends while another still connects to it breaks that connection
        answers.put(_Answer(rank, function(*args), None))
    except BaseException as error:
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        answers.put(_Answer(rank, None, (time.monotonic(), line, traceback.format_exc())))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
