"""Collectives between ranks of one machine's CPUs, through memory that they share.

gloo sends even a handful of numbers through several threads and sockets, in a dozen system calls on each side. Here
every rank writes its tensor to its place in one piece of memory, tells the others, and reads theirs.
"""

import mmap
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from engine.torch_names import ProcessGroup

PLACE_BYTES = 1 << 20
"""Bytes of a tensor that a rank shows the others at once."""
BACKEND = "shared_memory"
OPERATIONS: tuple[tuple[Any, Callable[..., torch.Tensor]], ...] = (
    (dist.ReduceOp.SUM, torch.add),
    (dist.ReduceOp.MAX, torch.maximum),
    (dist.ReduceOp.MIN, torch.minimum),
)
"""Reductions and their functions; a list, since torch's operations cannot be dictionary keys."""

Exchange = Callable[[torch.Tensor, torch.Tensor, int], None]
"""Called with a part of this rank's tensor, the same part of every rank's [ranks, elements], and its offset."""


class SharedMemoryGroup(ProcessGroup):
    """Sums, extremes and gathered tensors of ranks on one machine; CPU tensors, finished on return.

    Every rank adds up in one binary tree over the ranks, so that all hold the same bits. Memory has two halves that
    operations use in turn: a rank writes to a half again when it knows that every other has begun the operation after
    the one that half was last used for, and so has read it.

    A RuntimeError says which rank closed its connection, or that one did not come within the time limit.
    """

    def __init__(self, rank: int, peers: dict[int, socket.socket], memory: mmap.mmap) -> None:
        self._count = len(peers) + 1
        super().__init__(rank, self._count)  # type: ignore[call-arg]
        self._rank, self._peers = rank, peers
        self._halves = torch.frombuffer(memory, dtype=torch.uint8).view(2, self._count, PLACE_BYTES)
        self._half = 0

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:  # type: ignore[override]
        """`dist.all_reduce` of one contiguous tensor, in place."""
        flat = tensors[0].data.view(-1)
        operations = [function for name, function in OPERATIONS if options.reduceOp == name]
        if not operations:
            raise NotImplementedError(f"ranks of one machine do not reduce with {options.reduceOp}")
        (operation,) = operations

        def reduce(part: torch.Tensor, theirs: torch.Tensor, start: int) -> None:
            if len(theirs) == 2:  # in either order the same, and what is this rank's own lies nearer
                operation(part, theirs[1 - self._rank], out=part)
            else:
                _fold(operation, theirs, part)

        self._exchange(flat, reduce)

    def reduce(self, tensors: list[torch.Tensor], options: Any) -> None:  # type: ignore[override]
        """`dist.reduce` of one contiguous tensor: the sum, on its root alone."""

        def add(part: torch.Tensor, theirs: torch.Tensor, start: int) -> None:
            if self._rank == options.rootRank:
                _fold(torch.add, theirs, part)

        self._exchange(tensors[0].data.view(-1), add)

    def allgather(self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any) -> None:  # type: ignore[override]
        """`dist.all_gather` of one contiguous tensor."""
        flat = [output.data.view(-1) for output in outputs[0]]

        def gather(part: torch.Tensor, theirs: torch.Tensor, start: int) -> None:
            for output, other in zip(flat, theirs, strict=True):
                output[start : start + len(other)] = other

        self._exchange(tensors[0].data.view(-1), gather)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, options: Any) -> None:  # type: ignore[override]
        """`dist.reduce_scatter_single` of one contiguous tensor: this rank's part, along dim 0, of the sum."""
        mine = output.data.view(-1)
        first = self._rank * len(mine)

        def reduce(part: torch.Tensor, theirs: torch.Tensor, start: int) -> None:
            begin, end = max(first, start), min(first + len(mine), start + len(part))
            if begin < end:
                _fold(torch.add, theirs[:, begin - start : end - start], mine[begin - first : end - first])

        self._exchange(tensor.data.view(-1), reduce)

    def close(self) -> None:
        """Leave: the others' next operation fails."""
        for peer in self._peers.values():
            peer.close()

    def _exchange(self, flat: torch.Tensor, read: Exchange) -> None:
        """Show `flat` to the others and `read` theirs, a part at a time."""
        step = PLACE_BYTES // flat.element_size()
        for start in range(0, len(flat), step):
            part = flat[start : start + step]
            half = self._halves[self._half].view(part.dtype)[:, : len(part)]
            half[self._rank] = part
            self._meet()
            read(part, half, start)
            self._half = 1 - self._half

    def _meet(self) -> None:
        """Wait until every rank is here; what each wrote before, all can read."""
        other = self._rank
        try:
            for other in self._peers:
                self._peers[other].sendall(b"!")
            for other in self._peers:
                if not self._peers[other].recv(1):
                    raise ConnectionResetError
        except BlockingIOError as error:
            raise RuntimeError(f"timed out waiting for rank {other} of the group") from error
        except ConnectionError as error:
            raise RuntimeError(f"connection closed by peer: rank {other} of the group") from error


def _fold(operation: Callable[..., torch.Tensor], parts: torch.Tensor, out: torch.Tensor) -> None:
    """`out` takes every rank's part: those of neighbours are joined, then what became of neighbours, and so on."""
    left = list(parts)
    while len(left) > 2:
        alone = [left.pop()] if len(left) % 2 else []
        left = [operation(*pair) for pair in zip(left[::2], left[1::2], strict=True)] + alone
    operation(*left, out=out)


def share_memory(group: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup | None:
    """The ranks of a gloo group joined through shared memory; None, on every rank, where they are not on one machine.

    Linux only: sockets without a path, and memory without a name that rank 0 hands to the others, so that nothing is
    left behind however the ranks end.
    """
    machines: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(machines, _machine(), group=group)
    if set(machines) != {_machine()} or not machines[0]:
        return None
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _join, devices=["cpu"])
    ranks = dist.get_process_group_ranks(group)
    joined = dist.new_group(ranks, timeout, BACKEND, use_local_synchronization=True)
    assert isinstance(joined, SharedMemoryGroup)
    return joined


def _join(store: dist.Store, rank: int, count: int, timeout: timedelta) -> SharedMemoryGroup:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0mlm-{secrets.token_hex(16)}")
        listening.listen(count)
        store.set(f"address/{rank}", listening.getsockname())
        peers = _connect(rank, [store.get(f"address/{other}") for other in range(rank)], count, listening, timeout)
    if rank == 0:
        with os.fdopen(os.memfd_create("mlm"), "r+b") as file:
            file.truncate(2 * count * PLACE_BYTES)
            for peer in peers.values():
                socket.send_fds(peer, [b"!"], [file.fileno()])
            return SharedMemoryGroup(rank, peers, mmap.mmap(file.fileno(), 0))
    _, (descriptor, *_), _, _ = socket.recv_fds(peers[0], 1, 1)
    with os.fdopen(descriptor, "r+b") as file:
        return SharedMemoryGroup(rank, peers, mmap.mmap(file.fileno(), 0))


def _machine() -> str:
    """Names this machine and the network namespace that this process is in; empty where there is no shared memory."""
    if sys.platform != "linux":
        return ""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"


def _connect(
    rank: int, addresses: list[bytes], count: int, listening: socket.socket, timeout: timedelta
) -> dict[int, socket.socket]:
    """A connection to every other rank, in the ranks' order; waiting on one ends after `timeout`.

    Ranks before this one listen at `addresses`; those after it come to where it listens.
    """
    whole, part = divmod(timeout.total_seconds(), 1)
    limit = struct.pack("ll", int(whole), int(part * 1e6))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    peers = {}
    for other, address in enumerate(addresses):
        peers[other] = socket.socket(socket.AF_UNIX)
        peers[other].connect(address)
        peers[other].sendall(struct.pack("i", rank))
    for _ in range(rank + 1, count):
        peer, _ = listening.accept()
        peers[struct.unpack("i", peer.recv(4))[0]] = peer
    for peer in peers.values():
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    return dict(sorted(peers.items()))
