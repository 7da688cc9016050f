"""Settings of scoring, the ranks that it runs on, and sampling of tokens. Imports no torch."""

import atexit
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.lineage.config import Config
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.variables import launched_ranks

if TYPE_CHECKING:
    import torch


class Settings(Config):
    """Settings of how a model is computed, which `--set KEY=VALUE` of `mlm-eval` changes. No
    setting changes the protocol."""

    batch_size: PositiveInt | None = None
    """Number of rows per forward pass; by default as many as fit in memory."""
    workers: PositiveInt | None = None
    """Number of processes on a CPU; by default one per available core."""
    layout: Layout = Field(default_factory=lambda: Layout(dp=launched_ranks() or 1))
    """Ranks that share the model, such as `tp=2,pp=2`, or the batches, `dp=2`; `mlm-eval` starts
    them if they do not run yet. By default the ranks that torchrun or Slurm started share the
    batches."""
    backend: Literal["engine", "transformers"] | None = None
    """Program that computes the model; by default the engine for a GPT-2, transformers for any
    other model."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Number format of the computation; by default the stored one for a checkpoint of this suite,
    fp32 for any other."""
    device: Annotated[str, Field(pattern=r"^(cpu|cuda|mps|xpu)(:[0-9]+)?$")] | None = None
    """torch's name of a device, such as `cuda:1`; by default the GPU, if the machine has one."""
    vocab: Path | None = None
    """Folder with vocab.json and merges.txt, for a Megatron-LM checkpoint, which has no vocabulary;
    by default it is looked for."""
    heads: PositiveInt | None = None
    """Number of attention heads of a Megatron-LM checkpoint that does not say how many it has."""

    @field_validator("layout", mode="before")
    @classmethod
    def _read_layout(cls, value: Any) -> Any:
        """Return the Layout of a text such as `tp=2,pp=2`: sizes of tp, pp and dp, where an axis
        that is not named has size 1. Return any other value unchanged. Raises ValueError for a text
        of another form, or one that names an axis twice."""
        if not isinstance(value, str):
            return value
        parts = [re.fullmatch(r"\s*(tp|pp|dp)=([1-9][0-9]*)\s*", part) for part in value.split(",")]
        sizes = {part[1]: int(part[2]) for part in parts if part}
        if len(sizes) < len(parts):
            needed = "give one or more of tp, pp and dp, each once with its number of ranks"
            raise ValueError(f"{value!r} is not a layout such as tp=2,pp=2: {needed}")
        return Layout(**sizes)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.device and self.layout.world_size > 1:
            raise ValueError(
                "device is for one rank, and the layout has several, which take a GPU each or share"
                " the processor: leave device out"
            )
        return self


@dataclass(frozen=True)
class Sampling:
    """Settings of how a token is drawn from the model's distribution: temperature, then top-k, then
    top-p, and the seed.

    Raises BadInput for a value that leaves no distribution.
    """

    temperature: float = 1.0
    """Divisor of the logits."""
    top_k: int | None = None
    """Keep only the `top_k` likeliest tokens and those as likely as the last of them; None keeps
    all."""
    top_p: float | None = None
    """Keep only the fewest likeliest tokens that together have at least this probability (nucleus
    sampling, Holtzman et al. 2020); None keeps all."""
    seed: int = 1234

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise BadInput(
                f"a temperature of {self.temperature} is not above 0 and finite: give another, or"
                " for greedy decoding leave out temperature, top-k and top-p"
            )
        if self.top_k is not None and self.top_k < 1:
            raise BadInput(f"top-k = {self.top_k} leaves no token: give 1 or more, or leave it out")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise BadInput(
                f"top-p = {self.top_p} is not above 0 and at most 1: give another, or leave it out"
            )

    def probabilities(self, logits: "torch.Tensor") -> "torch.Tensor":
        """Return the probability of each token, [v], from the logits [v] of one prompt, by this
        object's temperature, top-k and top-p; 0 for a token that is left out."""
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
    Raises Interrupted as `launch` does.
    """
    if layout.world_size == 1:
        return
    from mlm_repro.engine.launch.local import launch
    from mlm_repro.engine.launch.mesh import leave_ranks

    if launched_ranks():
        # A process group that is left up can abort a process that exits.
        atexit.register(leave_ranks)
        return

    def run() -> None:
        try:
            main()
        finally:
            leave_ranks()

    raise SystemExit(launch(run, layout.world_size))
