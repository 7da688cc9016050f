"""This engine as a contender: the trainer's iteration without files and schedules."""

from typing import Protocol

from engine.pipeline.lowering import Interval
from experiments.bench.contender import Contender
from experiments.bench.sizes import BenchSize


class OurStep(Protocol):
    """A contender's step that can also be timed computation by computation."""

    def __call__(self, iteration: int, dropout: float, timeline: list[Interval] | None = None) -> float:
        """The mean loss; with `timeline`, this rank's computations are added to it as they end."""


def build_ours(contender: Contender, size: BenchSize) -> OurStep:
    """A step of this rank's part of the contender's layout."""
    import torch

    from engine.launch.mesh import build_mesh
    from engine.model.microbatch import PipelineInput
    from engine.parallel.layout import Layout
    from engine.rng import Dropout
    from engine.step import build_step

    train, parallel = size.train, contender.parallel
    dp = contender.ranks // (parallel.tp * parallel.pp)
    mesh = build_mesh(Layout(parallel.tp, parallel.pp, dp), parallel.sequence_parallel)
    _, training = build_step(size.model, train, parallel, mesh)
    share = train.global_batch_size // dp
    rows = range(mesh.dp.rank * share, (mesh.dp.rank + 1) * share)
    each = share // contender.microbatches

    def step(iteration: int, dropout: float, timeline: list[Interval] | None = None) -> float:
        batch = torch.from_numpy(size.batch(iteration)).to(mesh.device)
        microbatches = []
        for start in range(rows.start, rows.stop, each):
            places = tuple(range(start, start + each))
            tokens = batch[start : start + each]
            masks = Dropout(dropout, train.seed, iteration, places) if dropout else None
            microbatches.append(PipelineInput(tokens[:, :-1], tokens[:, 1:], masks))
        training.timeline = timeline
        return training.run(microbatches, train.learning_rate).loss

    return step
