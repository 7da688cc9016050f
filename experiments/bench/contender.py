"""A program that is measured, in one layout; ours is the trainer's iteration without files and schedules."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.config import ParallelConfig
from engine.pipeline.lowering import Interval
from experiments.bench.sizes import BenchSize
from lineage.extras import install_command

if TYPE_CHECKING:
    from engine.parallel.mesh import ParallelMesh

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


def build_ours(contender: Contender, size: BenchSize) -> Step:
    """A step of this rank's part of the contender's layout."""
    from engine.launch.mesh import build_mesh
    from engine.parallel.layout import Layout

    parallel = contender.parallel
    layout = Layout(parallel.tp, parallel.pp, contender.ranks // (parallel.tp * parallel.pp))
    return our_step(size, parallel, build_mesh(layout, parallel.sequence_parallel), contender.microbatches)


def our_step(size: BenchSize, parallel: ParallelConfig, mesh: "ParallelMesh", microbatches: int) -> Step:
    """A step of this rank's part of a mesh, in so many microbatches."""
    import torch

    from engine.model.microbatch import PipelineInput
    from engine.rng import Dropout
    from engine.step import build_step

    train = size.train
    _, training = build_step(size.model, train, parallel, mesh)
    share = train.global_batch_size // mesh.dp.size
    rows = range(mesh.dp.rank * share, (mesh.dp.rank + 1) * share)
    each = share // microbatches

    def step(iteration: int, dropout: float, timeline: list[Interval] | None = None) -> float:
        batch = torch.from_numpy(size.batch(iteration)).to(mesh.device)
        inputs = []
        for start in range(rows.start, rows.stop, each):
            places = tuple(range(start, start + each))
            tokens = batch[start : start + each]
            masks = Dropout(dropout, train.seed, iteration, places) if dropout else None
            inputs.append(PipelineInput(tokens[:, :-1], tokens[:, 1:], masks))
        training.timeline = timeline
        return training.run(inputs, train.learning_rate).loss

    return step
