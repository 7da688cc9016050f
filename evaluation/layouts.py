"""Evaluation on several ranks: what `--layout tp=2,pp=2` means. Imports no torch."""

import atexit
import os
from collections.abc import Callable

from engine.launch.local import launch
from engine.parallel.layout import Layout
from lineage.errors import BadInput

ONE_RANK = "tp=1"


def is_first_rank() -> bool:
    """Whether this process speaks to the user and writes files."""
    return os.environ.get("RANK", "0") == "0"


def parse_layout(text: str) -> Layout:
    """`tp=2,pp=2` as a layout; axes that are not named have size 1. Raises BadInput for anything else."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in ("tp", "pp", "dp") or axis in sizes or not size.isdecimal() or int(size) < 1:
            raise BadInput(f"{text!r} is not a layout such as tp=2,pp=2: axes are tp, pp and dp, each with its ranks")
        sizes[axis] = int(size)
    return Layout(**sizes)


def start_ranks(layout: Layout, main: Callable[[], object]) -> None:
    """Run this command's `main` again on every rank of the layout and exit with the ranks' code.

    Returns on a rank that torchrun, Slurm or this function started, and for a layout of one rank.
    """
    if layout.world_size == 1:
        return
    from engine.launch.rendezvous import leave_ranks

    if "WORLD_SIZE" in os.environ:
        atexit.register(leave_ranks)
        return

    def run() -> None:
        try:
            main()
        finally:
            leave_ranks()

    raise SystemExit(launch(run, layout.world_size))
