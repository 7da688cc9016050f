"""How to score, and on which ranks: what `--layout tp=2,pp=2` means. Imports no torch."""

import atexit
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from engine.parallel.layout import Layout
from lineage.errors import BadInput

ONE_RANK = Layout()


def is_first_rank() -> bool:
    """Whether this process speaks to the user and writes files."""
    return os.environ.get("RANK", "0") == "0"


def parse_layout(text: str | Layout) -> Layout:
    """`tp=2,pp=2` as a layout, which it may be already; axes that are not named have size 1.

    Raises BadInput for anything else.
    """
    if isinstance(text, Layout):
        return text
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in ("tp", "pp", "dp") or axis in sizes or not size.isdecimal() or int(size) < 1:
            raise BadInput(f"{text!r} is not a layout such as tp=2,pp=2: axes are tp, pp and dp, each with its ranks")
        sizes[axis] = int(size)
    return Layout(**sizes)


def parse_share(text: str | float) -> float:
    """`0.5%` as 0.005, which it may be already. Raises BadInput for what is no percentage above 0."""
    if isinstance(text, float):
        return text
    number = text.removesuffix("%")
    if number == text or not number.replace(".", "", 1).isdecimal() or not float(number) > 0:
        raise BadInput(f"{text!r} is not a percentage such as 0.5%")
    return float(number) / 100


@dataclass(frozen=True)
class Settings:
    """How to score, an option each of commands that score; of these only `limit` and `until` change what is measured.

    Raises BadInput where both are given.
    """

    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Score only so many windows or examples, spread evenly; the result is partial."),
    ] = None
    until: Annotated[
        float | None,
        typer.Option(
            parser=parse_share,
            metavar="PERCENT",
            help="Score a random sample, until its standard error, of a perplexity as a share, is at most this.",
        ),
    ] = None
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Rows per forward pass; by default as many as fit in memory.")
    ] = None
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes on a CPU; by default one per available core.")
    ] = None
    vocab: Annotated[
        Path | None, typer.Option(help="Folder with vocab.json and merges.txt for a Megatron-LM checkpoint.")
    ] = None
    heads: Annotated[
        int | None, typer.Option(min=1, help="Attention heads of a Megatron-LM checkpoint that does not say.")
    ] = None
    layout: Annotated[
        Layout,
        typer.Option(
            parser=parse_layout,
            metavar="<str>",
            show_default="tp=1",
            help="Ranks that share the model, such as tp=2,pp=2; started here if nobody has.",
        ),
    ] = ONE_RANK

    def __post_init__(self) -> None:
        if self.limit is not None and self.until is not None:
            raise BadInput("--until says by itself how much is scored: leave out --limit")


def start_ranks(layout: Layout, main: Callable[[], object]) -> None:
    """Run this command's `main` again on every rank of the layout and exit with the ranks' code.

    Returns on a rank that torchrun, Slurm or this function started, and for a layout of one rank.
    """
    if layout.world_size == 1:
        return
    from engine.launch.local import launch
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
