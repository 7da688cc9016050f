"""Starts one process per local rank where neither torchrun nor Slurm has. Imports no torch."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from engine.config import RunConfig
from lineage.children import end_with_parent
from lineage.environment import available_cores, list_gpus
from lineage.errors import Interrupted

STACK_SECONDS = 0.5
"""Given to a rank that did not end, to print its stack."""


def default_ranks(config: RunConfig) -> int:
    """One rank per GPU, or per processor core without GPUs, as many as divide the batch; at least tp × pp."""
    model_ranks = config.parallel.tp * config.parallel.pp
    available = max((len(list_gpus()) or available_cores()) // model_ranks, 1)
    microbatches = config.train.batch_in_microbatches
    return model_ranks * max(dp for dp in range(1, min(available, microbatches) + 1) if microbatches % dp == 0)


def launch(module: str, arguments: Sequence[str], ranks: int) -> int:
    """Run `python -P -m module arguments` as `ranks` processes that find each other; returns the exit code.

    When one fails the others are ended. SIGTERM and Ctrl-C are passed on; on Linux the ranks do not outlive this
    process, however it ends. One thread per rank. Raises Interrupted if it was stopped before training began
    or a signal ended a rank.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        for rank in range(ranks)
    ]

    stopped = False

    def pass_on(number: int, frame: object) -> None:
        nonlocal stopped
        stopped = True
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    old = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        code = _wait(processes)
        if stopped and code and all(process.poll() in (None, 0, -signal.SIGTERM) for process in processes):
            raise Interrupted("stopped before training began; the same command goes on from what was finished")
        killed = [rank for rank, process in enumerate(processes) if (process.poll() or 0) < 0 and not stopped]
        if killed and code in (1, Interrupted.exit_code):
            name = signal.Signals(-processes[killed[0]].returncode).name
            raise Interrupted(f"rank {killed[0]} was ended by {name}; the same command goes on from what was finished")
        return code
    finally:
        hanging = [process for process in processes if process.poll() is None]
        for process in hanging:
            process.send_signal(signal.SIGUSR1)  # rendezvous.STACK_SIGNAL
            process.send_signal(signal.SIGCONT)
        time.sleep(STACK_SECONDS if hanging else 0)
        for process in hanging:
            process.kill()
        for number, handler in old.items():
            signal.signal(number, handler)


def _wait(processes: list[subprocess.Popen[bytes]], grace_seconds: float = 10.0) -> int:
    failed_at = None
    while True:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return 0
        failed = [code for code in codes if code not in (None, 0)]
        if failed and failed_at is None:
            failed_at = time.monotonic()
        if None not in codes or (failed_at and time.monotonic() - failed_at > grace_seconds):
            positive = [code for code in failed if code and code > 0]
            causes = [code for code in positive if code != Interrupted.exit_code]  # those of ranks that lost nobody
            return (causes or positive or [1])[0]
        time.sleep(0.05)
