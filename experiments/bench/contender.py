"""A program that is measured, in one layout."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.config import ParallelConfig
from experiments.bench.sizes import BenchSize
from lineage.extras import install_command

TOLERANCE = 1e-3
"""By how much the losses of two contenders may differ."""

Step = Callable[..., float]
"""(iteration, dropout probability) → mean loss of the global batch before the update, on every rank. Ours also takes a
list of intervals, `timeline`, to which this rank's computations are added as they end."""


@dataclass(frozen=True)
class Contender:
    """One program in one layout."""

    name: str
    ranks: int
    build: Callable[["Contender", BenchSize], Step]
    """Called on every rank, within its process group."""
    is_ours: bool = False
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    microbatches: int = 1
    """Microbatches of each rank in an iteration."""
    needs: str = ""
    """Module without which it does not run."""
    is_tuned: bool = True
    """Whether it has this engine's allocator setting and the fused AdamW, or what its authors ship."""
    is_compiled: bool = False
    """Whether a peer's model is compiled by torch.compile."""

    @property
    def is_installed(self) -> bool:
        """Whether what it needs can be imported."""
        return not self.needs or importlib.util.find_spec(self.needs) is not None

    def describe(self) -> dict[str, Any]:
        """Name, ranks and layout, as plain JSON values."""
        layout: dict[str, Any] = {"name": self.name, "ranks": self.ranks, "microbatches": self.microbatches}
        return layout | ({"schedule": self.parallel.schedule} if self.parallel.pp > 1 else {})


def left_out(every: Sequence[Contender]) -> dict[str, str]:
    """Those that are not installed, and what installs them."""
    why = f"not installed: {install_command('bench')}"
    return {contender.name: why for contender in every if not contender.is_installed}
