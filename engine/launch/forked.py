"""Runs a function on gloo ranks in forked processes of this machine, over a file rendezvous, with a
hard timeout.

The ranks inherit the parent's imports and memory without a copy. CPUs only, one thread per rank; on
Linux the ranks do not outlive the parent.
"""

import faulthandler
import multiprocessing
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import torch.distributed as dist

from mlm_repro.engine.launch.local import become_rank
from mlm_repro.engine.launch.threads import RanksFailed

GRACE_SECONDS = 5.0
"""Seconds that the other ranks have to report after one has failed, and that all have to end after
all have answered."""


class _Answer(NamedTuple):
    value: Any
    failure: tuple[float, str, str] | None = None
    """Time of the failure in seconds of the monotonic clock, the failure in one line, and its
    traceback as text; None if the call succeeded."""


def run_forked(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 300.0
) -> list[Any]:
    """Call `function(*args)` in each of `world_size` ranks, processes that are forked here and see
    no GPU, and return a list of the results in rank order. Results go through pickle. Several ranks
    share a gloo process group.

    Raises RanksFailed when a rank raises an exception, ends without a result, or is not done within
    `timeout_seconds`, by default 300; the others are then ended. On a timeout every rank that still
    runs prints its stack to stderr.
    """
    # Forked, not spawned: a rank then needs no second import of torch, which takes longer than most
    # tests.
    context = multiprocessing.get_context("fork")
    answers = {}
    waiting = {}
    answered: Any
    processes = []
    died = list[int]()
    started = monotonic()
    deadline = started + timeout_seconds + GRACE_SECONDS
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world_size):
                reader, writer = context.Pipe(duplex=False)
                waiting[reader] = rank
                arguments = (
                    rank,
                    world_size,
                    Path(folder) / "store",
                    timeout_seconds,
                    writer,
                    function,
                    args,
                )
                processes.append(context.Process(target=_enter, args=arguments))
                processes[-1].start()
                writer.close()  # the pipe then ends with the rank
            while waiting and not died:
                # Without time left, the answers that are there already are still read.
                ready = wait(list(waiting), max(deadline - monotonic(), 0))
                if not ready:
                    break
                for answered in ready:
                    rank = waiting.pop(answered)
                    with suppress(EOFError, OSError):
                        answers[rank] = answered.recv()
                    # A pipe that ends before its time belongs to a rank that was killed; after the
                    # time-out it is one of those that are ended here.
                    if rank not in answers and monotonic() < started + timeout_seconds:
                        died.append(rank)
                    # The others may now wait for a rank that is gone. They get a moment to say what
                    # they saw.
                    if rank not in answers or answers[rank].failure:
                        deadline = min(deadline, monotonic() + GRACE_SECONDS)
        finally:
            for process in processes:
                process.join(GRACE_SECONDS if len(answers) == world_size else 0)
                process.kill()
                process.join()
    if died:
        status = processes[died[0]].exitcode
        raise RanksFailed(
            f"rank {died[0]} ended with exit code {status} before it answered: look for the reason"
            " on standard error; code -9 mostly means that memory ran out",
            "",
            lost=True,
        )
    # The first failure in time: later ones mostly say that their peer has gone.
    failures = sorted((answer.failure, rank) for rank, answer in answers.items() if answer.failure)
    if failures:
        (_, line, text), rank = failures[0]
        raise RanksFailed(
            f"rank {rank} failed: {line}", f"mend this error, which was raised here:\n{text}"
        )
    if silent := sorted(set(range(world_size)) - answers.keys()):
        raise RanksFailed(
            f"rank {silent[0]} was not done after {timeout_seconds:.0f} s and was ended; its stack"
            " on standard error shows where it stood",
            "",
            lost=True,
        )
    return [answers[rank].value for rank in range(world_size)]


def _enter(
    rank: int,
    world_size: int,
    store: Path,
    timeout_seconds: float,
    writer: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Run as rank `rank` in a forked process: set a rank's environment variables, by which it sees
    no GPU, and one thread for torch; join the gloo group at the file `store` if there are several
    ranks; call `function(*args)`, and send its result or its failure as an `_Answer` through the
    pipe `writer`. After `timeout_seconds` the process prints its stack to stderr and ends."""
    become_rank(rank, {"WORLD_SIZE": str(world_size), "CUDA_VISIBLE_DEVICES": ""})
    # In the rank itself, for a parent cannot see where a child hangs.
    faulthandler.dump_traceback_later(timeout_seconds, exit=True)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    try:
        if world_size > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
            )
            # A rank that ends while another still connects to it would break that connection.
            dist.barrier()
        writer.send(_Answer(function(*args)))
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        line += (
            ""
            if str(error)
            else f"{frame.line} in {Path(frame.filename).name}, line {frame.lineno}"
        )
        writer.send(_Answer(None, (monotonic(), line, traceback.format_exc())))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
