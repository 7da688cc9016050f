"""Ports for servers that cannot be given a socket which listens already."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """A port of this machine that no other process is given as long as it is held.

    A socket that reuses addresses has it and does not listen. So a server that reuses addresses
    too, as those of torch, Slurm and Python do, can listen there, and a client is refused until it
    does."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
