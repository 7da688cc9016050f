"""Forks one process per local rank where neither torchrun nor Slurm has started them, and keeps
large buffers from being returned to the system.

Imports no torch.
"""

import ctypes
import gc
import multiprocessing
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess

from mlm_repro.lineage.command import run_command
from mlm_repro.lineage.errors import Interrupted, afterwards
from mlm_repro.lineage.processes import (
    end_with_parent,
    ended_by,
    exit_code_of,
    held_back,
    when_stopped,
)
from mlm_repro.lineage.variables import DOOR

M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_MAX = -4
INTERFACES = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
"""Names of the environment variables that name the network interface on which gloo and NCCL listen.
Forked ranks use the loopback unless these are set."""
# Half a second was too short on a busy machine.
STACK_SECONDS = 2.0
"""Seconds that a rank that did not end has to print its stack before it is killed."""


def launch(work: Callable[[], object], ranks: int) -> int:
    """Fork `ranks` processes that find each other, call `work`, a function without arguments, in
    each and wait for them; return 0, or the documented exit code of a rank that failed, also if the
    ranks were stopped during the work.

    The ranks inherit all imports, and run one thread each. This process touches no GPU. If a rank
    fails, the others are ended. SIGTERM and Ctrl-C are passed on; on Linux the ranks do not outlive
    this process. Raises Interrupted if the ranks were stopped before the work began, or if a signal
    from elsewhere ended one and no rank failed by itself.
    """
    from mlm_repro.engine.launch.mesh import STACK_SIGNAL

    # The port is opened here and handed to rank 0: a free port that was only asked for may be taken
    # before it listens.
    context = multiprocessing.get_context("fork")
    listener = socket.create_server(("127.0.0.1", 0))
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }

    def be_rank(rank: int) -> None:
        if rank == 0:
            os.environ[DOOR] = str(listener.detach())
        else:
            listener.close()
        become_rank(rank, shared)
        # A terminal sends Ctrl-C to every process of its group; only the parent shall hear it, and
        # passes it on once.
        os.setsid()
        run_command(lambda **_: work())

    processes = [context.Process(target=be_rank, args=(rank,)) for rank in range(ranks)]
    stopped = False

    def pass_on(number: int) -> None:
        nonlocal stopped
        stopped = True
        for process in processes:
            if process.exitcode is None:
                process.terminate()

    with when_stopped(pass_on):
        try:
            # A signal between two forks would leave ranks that wait for others that never start.
            with held_back(), listener:
                for process in processes:
                    process.start()
            code = exit_code_of(_wait(processes), stopped)
            if (
                stopped
                and code
                and all(process.exitcode in (None, 0, -signal.SIGTERM) for process in processes)
            ):
                raise Interrupted(f"stopped before the work began; the same command {afterwards()}")
            killed = [
                rank
                for rank, process in enumerate(processes)
                if (process.exitcode or 0) < 0 and not stopped
            ]
            if killed and code == Interrupted.exit_code:
                raise Interrupted(
                    f"rank {killed[0]} {ended_by(processes[killed[0]].exitcode or 0)}; the same"
                    f" command {afterwards()}"
                )
            return code
        finally:
            # What did not end in time says where it stands before it is killed; a stopped process
            # hears that only when it goes on.
            hanging = [
                process.pid for process in processes if process.exitcode is None and process.pid
            ]
            for number in (STACK_SIGNAL, signal.SIGCONT):
                for pid in hanging:
                    os.kill(pid, number)
            time.sleep(STACK_SECONDS if hanging else 0)
            for process in processes:
                process.kill()


def become_rank(rank: int, shared: Mapping[str, str]) -> None:
    """Make this forked process the rank `rank`: on Linux it ends with its parent; torch, if it is
    imported already, runs one thread; gloo and NCCL use the loopback unless a variable names
    another interface. Sets the environment variables RANK, LOCAL_RANK, both to `rank`, and those in
    `shared`, name → value."""
    end_with_parent()
    gc.freeze()  # what the parent has made is not looked through, nor copied by looking
    # gloo and NCCL would otherwise listen on an outer interface, for ranks that all live here.
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "")
    interfaces = dict.fromkeys(INTERFACES - os.environ.keys(), loopback) if loopback else {}
    os.environ |= {**interfaces, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    if "torch" in sys.modules:
        # The number that torch read when the parent imported it outlives the environment variable.
        sys.modules["torch"].set_num_threads(1)


def _wait(processes: Sequence[BaseProcess], grace_seconds: float = 10.0) -> int:
    """Wait for the processes of the ranks and return 0, or the exit code of a rank that failed:
    another than an interruption's if there is one, and -SIGKILL if only signals ended ranks.

    After a failure the other ranks have `grace_seconds`, by default 10, to end; then they are left
    running.
    """
    failed_at = None
    while True:
        codes = [process.exitcode for process in processes]
        if all(code == 0 for code in codes):
            return 0
        failed = [code for code in codes if code not in (None, 0)]
        if failed and failed_at is None:
            failed_at = time.monotonic()
        if None not in codes or (failed_at and time.monotonic() - failed_at > grace_seconds):
            positive = [code for code in failed if code and code > 0]
            # Ranks that lost a peer end with the code of an interruption. A rank with another code
            # is the cause.
            causes = [code for code in positive if code != Interrupted.exit_code]
            return (causes or positive or [-signal.SIGKILL])[0]
        time.sleep(0.05)


def keep_large_buffers() -> None:
    """Keep glibc, for the rest of this process, from returning large buffers to the system each
    iteration, the largest cost of training on a CPU. Does nothing with another C library.

    Every allocation is then served from a heap that is not trimmed. Call before torch is imported.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    # Each large buffer would otherwise be mapped, zeroed page by page at its first touch, and
    # unmapped, every iteration.
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(M_TOP_PAD, 64 * 2**20)
