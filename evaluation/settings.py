"""Settings of a scoring, the ranks it runs on, and how tokens are drawn. Imports no torch."""

import atexit
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.variables import launched_ranks

if TYPE_CHECKING:
    import torch

ONE_RANK = Layout()


def parse_layout(text: str | Layout) -> Layout:
    """The layout of `tp=2,pp=2`; an axis without a name has size 1, and a layout stays as it is.

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


def parse_device(text: str) -> str:
    """A device by torch's name, such as `cuda:1`, which may not be there. Raises BadInput for anything else."""
    if not re.fullmatch(r"(cpu|cuda|mps|xpu)(:[0-9]+)?", text):
        raise BadInput(f"{text!r} is no device: give cpu, cuda, mps or xpu, with a number after a colon if need be")
    return text


def parse_batch_size(text: str | int) -> int | None:
    """The number of rows; None for `auto`. Raises BadInput for anything else."""
    if text == "auto":
        return None
    if not str(text).isdecimal() or int(text) < 1:
        raise BadInput(f"{text!r} is no batch size: give a number of rows from 1 on, or auto")
    return int(text)


@dataclass(frozen=True)
class Settings:
    """Settings of a scoring; `limit` changes what is measured, `backend` and `dtype` how it is rounded."""

    limit: int | None = None
    """Windows or examples to score, spread evenly over the test."""
    batch_size: int | None = None
    workers: int | None = None
    vocab: Path | None = None
    heads: int | None = None
    layout: Layout = ONE_RANK
    backend: Literal["engine", "transformers"] | None = None
    """Program that computes the model; by default the engine for a GPT-2, transformers for another."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Number format that is computed in; by default that of a checkpoint of this suite, fp32 for others."""
    device: str | None = None
    """torch's name of a device; by default the GPU, if there is one."""

    def __post_init__(self) -> None:
        if self.device and self.layout.world_size > 1:
            raise BadInput("--device is for one rank: several take a GPU each, or share the processor")


@dataclass(frozen=True)
class Sampling:
    """Steps, in order, by which a token is drawn from the model's distribution.

    Raises BadInput for a value that leaves no distribution.
    """

    temperature: float = 1.0
    """Divides the logits."""
    top_k: int | None = None
    """Keep only the k likeliest tokens and those as likely as the last of them."""
    top_p: float | None = None
    """Keep only the likeliest tokens that together have this probability (nucleus sampling, Holtzman et al. 2020)."""
    seed: int = 1234

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise BadInput(f"a temperature of {self.temperature} is not above 0 and finite; without one it is greedy")
        if self.top_k is not None and self.top_k < 1:
            raise BadInput(f"top-k = {self.top_k} leaves no token")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise BadInput(f"top-p = {self.top_p} is not in (0, 1]")

    def probabilities(self, logits: "torch.Tensor") -> "torch.Tensor":
        """Probability of each token, [v], from its logits."""
        logits = logits / self.temperature
        if self.top_k is not None:
            smallest = logits.topk(min(self.top_k, len(logits))).values[-1]
            logits = logits.masked_fill(logits < smallest, float("-inf"))
        if self.top_p is not None and self.top_p < 1:
            ascending, order = logits.sort()
            is_out = ascending.softmax(0).cumsum(0) <= 1 - self.top_p
            is_out[-1] = False
            logits = logits.masked_fill(is_out.clone().scatter_(0, order, is_out), float("-inf"))
        return logits.softmax(0)


def start_ranks(layout: Layout, main: Callable[[], object]) -> None:
    """Run this command's `main` again on every rank of the layout and exit with the ranks' code.

    Returns on a rank that torchrun, Slurm or this function started, and for a layout of one rank.
    """
    if layout.world_size == 1:
        return
    from mlm_repro.engine.launch.local import launch
    from mlm_repro.engine.launch.mesh import leave_ranks

    if launched_ranks():
        atexit.register(leave_ranks)
        return

    def run() -> None:
        try:
            main()
        finally:
            leave_ranks()

    raise SystemExit(launch(run, layout.world_size))
