"""Run a function on gloo ranks in forked processes, over a file rendezvous, with a hard timeout."""

import faulthandler
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor  # imported here once, so that forked ranks do not each import it


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 120.0) -> list[Any]:
    """What `function(*args)` returned on each rank. On a timeout every rank prints its stack and the call fails."""
    context = multiprocessing.get_context("fork")
    results: Queue[tuple[int, Any, str | None]] = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_enter, args=(rank, world_size, Path(folder) / "store", timeout_seconds, results, function, args)
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            collected = [results.get(timeout=timeout_seconds + 10) for _ in processes]
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
    failures = [text for _, _, text in collected if text]
    assert not failures, "\n".join(failures)
    return [value for _, value, _ in sorted(collected, key=lambda item: item[0])]


def _enter(
    rank: int, world_size: int, store: Path, timeout_seconds: float, results: "Queue[tuple[int, Any, str | None]]",
    function: Callable[..., Any], args: tuple[Any, ...],
) -> None:  # fmt: skip
    faulthandler.dump_traceback_later(timeout_seconds, exit=True)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    try:
        if world_size > 1:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        results.put((rank, function(*args), None))
    except BaseException:
        results.put((rank, None, f"rank {rank}:\n{traceback.format_exc()}"))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
