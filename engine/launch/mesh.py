"""Joins the launched ranks, checks that they were given the same work, and builds their mesh."""

import faulthandler
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from os import environ
from typing import Any

import torch
import torch.distributed as dist
from torch import cuda

from mlm_repro.engine.launch.threads import ThreadAxis, current_rank
from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.engine.parallel.mesh import (
    Axis,
    GroupAxis,
    LoneAxis,
    ParallelMesh,
    Waiting,
    serial_mesh,
)
from mlm_repro.lineage.config import flatten
from mlm_repro.lineage.errors import BadInput, HardwareFault, Interrupted, afterwards
from mlm_repro.lineage.variables import DOOR, launched_ranks, number

JOIN_SECONDS = "MLM_JOIN_SECONDS"
"""Name of the environment variable with the seconds that a rank waits for the others to start, by
default 300: hundreds of processes import libraries from one file system."""
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Time after which a rank stops waiting for another during the work (gloo; with NCCL its own
watchdog ends the process)."""
REPORT_SECONDS = 5.0
"""Seconds that a rank, having stopped waiting, gives the others to report that they wait too."""
FLIGHT_RECORDS = "2000"
"""Number of collectives that NCCL's flight recorder remembers, and dumps when one does not end."""
LOCAL_RANKS = "LOCAL_RANK", "SLURM_LOCALID"
"""Names of environment variables with a rank's number on its machine: torchrun sets the first,
`srun` alone the second."""
STACK_SIGNAL = signal.SIGQUIT
"""Signal that makes a launched rank print its stack to stderr and go on."""
PEER_GONE = (
    "connection was likely closed",
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "remote process exited",
)
"""Phrases, in lower case, by which the text of an error of gloo or NCCL says that a peer process
has ended."""


class RanksMissing(HardwareFault):
    """Error: some ranks did not start in time, or one left before all had come; exit code 4."""


class RankLost(Interrupted):
    """Error: another rank ended or hangs during the work; exit code 7."""


def launched_world_size() -> int:
    """Return the number of ranks that were launched in all, as WORLD_SIZE or, for ranks that are
    threads, `run_threads` states it; 1 for a plain process. Raises BadInput if WORLD_SIZE is no
    whole number."""
    thread = current_rank()
    return thread.world.size if thread else launched_ranks() or 1


def local_rank() -> int:
    """Return this rank's number on its machine, as the launcher gave it in LOCAL_RANK or
    SLURM_LOCALID; 0 for a plain process. For a rank that is a thread it is its number among all
    ranks. Raises BadInput if the variable is no whole number."""
    thread = current_rank()
    return (
        thread.rank if thread else next((n for n in map(number, LOCAL_RANKS) if n is not None), 0)
    )


def join_ranks() -> None:
    """Wait until every launched rank has come, and make their process group, with NCCL on GPUs and
    gloo on CPUs. Choose this rank's GPU. SIGQUIT makes a rank print its stack from then on. Does
    nothing for one rank and for ranks that are threads; a group that exists stays. Every rank calls
    it.

    Raises RanksMissing if not every rank came in time, BadInput if RANK, MASTER_ADDR or MASTER_PORT
    is missing or unusable, or if WORLD_SIZE, MLM_JOIN_SECONDS or, with GPUs, the rank's number on
    its machine is no whole number.
    """
    ranks = launched_world_size()
    if ranks == 1 or current_rank():
        return
    if cuda.is_available():
        cuda.set_device(local_rank())
    if dist.is_initialized():
        return
    rank, host, port = (environ.get(name, "") for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    if not (rank.isdigit() and host and port.isdigit()):
        raise BadInput(
            "the environment has WORLD_SIZE, but no usable RANK, MASTER_ADDR or MASTER_PORT: start"
            " the ranks with torchrun, or unset WORLD_SIZE"
        )
    if not (waits := environ.get(JOIN_SECONDS, "300")).isdigit():
        raise BadInput(
            f"the environment variable {JOIN_SECONDS} is {waits!r}, not a whole number of seconds:"
            " correct it or unset it"
        )
    agent_serves = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    deadline = time.monotonic() + int(waits)
    try:
        shared = dist.TCPStore(
            host,
            int(port),
            ranks,
            is_master=rank == "0" and not agent_serves,
            multi_tenant=True,
            timeout=timedelta(seconds=int(waits)),
            wait_for_workers=False,
            master_listen_fd=number(DOOR),
        )
    except dist.DistError as error:
        alone = RanksMissing(
            f"rank {rank} of {ranks} could not meet the others at {host}:{port} within {waits}"
            " seconds: check that they have started, and MASTER_ADDR and MASTER_PORT"
        )
        alone.on_every_rank = True  # rank 0, which speaks to the user, did not start
        raise alone from error
    # torchrun keeps its store when it restarts ranks. Without a prefix for each attempt, the count
    # below would go on from the last attempt's.
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"mlm/attempt-{attempt}", shared)
    # Counted before the process group is made, whose own time-out would not say how many ranks are
    # missing.
    came = store.add("mlm/ranks", 1)
    try:
        while came < ranks and time.monotonic() < deadline:
            time.sleep(0.02)
            came = store.add("mlm/ranks", 0)
    except dist.DistError as error:
        raise RanksMissing(
            f"rank 0 or its launcher ended before all {ranks} ranks had come: its own output says"
            " why"
        ) from error
    if came < ranks:
        raise RanksMissing(
            f"only {came} of {ranks} ranks came within {waits} seconds: start the others, or let"
            f" ranks wait longer with {JOIN_SECONDS}"
        )
    # A rank that hangs in a collective can be asked where.
    faulthandler.register(STACK_SIGNAL)
    backend = "gloo"
    device = None
    if cuda.is_available():
        environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", FLIGHT_RECORDS)
        environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        backend = "nccl"
        device = torch.device("cuda", cuda.current_device())
    dist.init_process_group(
        backend,
        store=store,
        rank=int(rank),
        world_size=ranks,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device,
    )


def leave_ranks() -> None:
    """Take down this rank's process group of torch.distributed; do nothing if there is none. Left
    up, the group can abort a process that exits."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def telling_of_lost_ranks() -> Iterator[None]:
    """Context manager: turn the errors with which gloo and NCCL, in the block, report a peer that
    has ended or does not answer into RankLost; other errors pass. After a time-out this rank first
    prints to stderr where it waits."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).lower()
        if "timed out" in text or "timeout" in text:
            raise _hanging(error) from error
        if not any(words in text for words in PEER_GONE):
            raise
        raise RankLost(
            f"another rank ended during the work; the same command {afterwards()}"
        ) from error


def _hanging(error: RuntimeError) -> RankLost:
    """Print to stderr the traceback of the time-out `error`, which shows the line at which this
    rank waits, and return, after 5 seconds, a RankLost that names the ranks that hang: those that
    do not report in this time that they wait too. It names rank 0 if that one's store is lost, and
    none if all ranks report."""
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    print(f"rank {rank} waits here:", file=sys.stderr, flush=True)
    traceback.print_tb(error.__traceback__)
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set_timeout(timedelta(seconds=REPORT_SECONDS))
        store.set(f"mlm/waits/{rank}", "")
        time.sleep(REPORT_SECONDS)
        silent = [other for other in range(ranks) if not store.check([f"mlm/waits/{other}"])]
    except RuntimeError:  # rank 0 keeps the store
        silent = [0]
    seconds = COLLECTIVE_TIMEOUT.total_seconds()
    who = (
        f"rank {', '.join(map(str, silent))} did"
        if silent
        else "the ranks waited for each other and did"
    )
    sentence = f"{who} not answer within {seconds:.0f} seconds; the same command {afterwards()}"
    return RankLost(sentence, on_every_rank=0 in silent)


def check_agreement(config: dict[str, Any]) -> None:
    """Compare `config`, this rank's configuration as a nested dict, with those of the other ranks.
    Raises BadInput on every rank, naming the first key that differs. Every rank calls it, after
    `join_ranks`; one rank and ranks that are threads are not compared."""
    if launched_world_size() == 1 or current_rank():
        return
    configs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(configs, config)
    flat = [flatten(configuration) for configuration in configs]
    for rank, other in enumerate(flat):
        for key in sorted(flat[0].keys() | other.keys()):
            first = flat[0].get(key)
            differing = other.get(key)
            if first != differing:
                raise BadInput(
                    f"the ranks were given different configurations: {key} is {first!r} on rank 0"
                    f" and {differing!r} on rank {rank}"
                )


def local_device() -> torch.device:
    """Return the torch device of the calling rank: the GPU whose number the function `local_rank`
    returns, or the CPU if the machine has no GPU or ranks are threads. Raises BadInput as that
    function does."""
    if current_rank() or not cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank())


def build_mesh(layout: Layout, sequence_parallel: bool = False) -> ParallelMesh:
    """Join the ranks, unless they have joined, and return the ParallelMesh of `layout`, as this
    rank sees it, over the started threads or processes. Every rank calls it. Processes communicate
    through NCCL on GPUs, gloo on CPUs; one rank alone joins nothing.

    `sequence_parallel` divides activations along the sequence, and has no effect without tensor
    parallelism. Raises BadInput if the number of ranks differs from the layout's, and the errors of
    `join_ranks`, such as RanksMissing if some do not come.
    """
    if layout.world_size != launched_world_size():
        raise BadInput(
            f"the layout {layout} needs {layout.world_size} ranks, and {launched_world_size()} were"
            " started: start as many, or change the layout"
        )
    thread = current_rank()
    device = local_device()
    waiting = Waiting()
    if layout.world_size == 1:
        return serial_mesh(device)
    join_ranks()
    rank = thread.rank if thread else dist.get_rank()
    # Every rank goes through all lines: a process group must be made by all processes, members or
    # not, in one order.
    lines = [layout.lines(number) for number in range(layout.world_size)]

    def joined(members: tuple[int, ...], group: dist.ProcessGroup | None) -> Axis:
        arguments = len(members), members.index(rank), waiting
        return (
            ThreadAxis(*arguments, thread.world, members)
            if thread
            else GroupAxis(*arguments, group)
        )

    def axis(number: int) -> Axis:
        own: Axis = LoneAxis(waiting=waiting)
        for members in dict.fromkeys(line[number] for line in lines if len(line[number]) > 1):
            group = None if thread else dist.new_group(members, timeout=COLLECTIVE_TIMEOUT)
            own = joined(members, group) if members == lines[rank][number] else own
        return own

    tp, pp, dp, embedding = map(axis, range(4))
    world = joined(tuple(range(layout.world_size)), None if thread else dist.group.WORLD)
    mesh = ParallelMesh(
        layout, tp, pp, dp, embedding, device, sequence_parallel and layout.tp > 1, world
    )
    world.barrier()  # a rank that leaves now finds every connection made
    return mesh
