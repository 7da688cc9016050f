"""Forward and backward of a microbatch as CUDA graphs, which one rank alone replays while shapes stay.

`torch.cuda.graph` forbids that the host waits, copies or decides: inputs lie in tensors of their own, dropout's keys
and the loss scale among them, and what differs between microbatches is copied there.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch

from mlm_repro.engine.model.microbatch import PipelineInput
from mlm_repro.engine.optim.gradients import GradientReducer

Run = Callable[[PipelineInput, torch.Tensor], torch.Tensor]
"""(microbatch, loss scale) → loss × sequences; the gradients go to the reducer."""


@dataclass(frozen=True)
class MicrobatchGraphs:
    """An iteration's first microbatch, whose gradients replace the last iteration's, and any other, whose are added."""

    inputs: PipelineInput
    scale: torch.Tensor
    graphs: list[tuple[torch.cuda.CUDAGraph, torch.Tensor]]
    """Each with its loss × sequences."""
    arrived: set[int]
    """Parameters that have a gradient."""

    @classmethod
    def capture(cls, run: Run, batch: PipelineInput, reducer: GradientReducer) -> "MicrobatchGraphs":
        """Run twice, so that everything is compiled and loaded, then capture. Gradients are left without meaning."""
        inputs, scale = deepcopy(batch), torch.ones((), device=batch.tokens.device)
        for each in _tensors(inputs):
            each.zero_()  # a replay that did not copy its inputs would be seen
        reducer.begin()
        for _ in range(2):
            run(inputs, scale)
        reducer.begin()
        graphs, pool = [], torch.cuda.graph_pool_handle()
        for _ in range(2):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                loss = run(inputs, scale)
            graphs.append((graph, loss))
        return cls(inputs, scale, graphs, set(reducer.arrived))

    def fits(self, batch: PipelineInput) -> bool:
        """True if the graphs, which keep the probability of dropout, compute this microbatch."""
        return [each.shape for each in _tensors(batch)] == [each.shape for each in _tensors(self.inputs)]

    def run(self, microbatches: Sequence[PipelineInput], loss_scale: float) -> torch.Tensor:
        """Sum of (loss × sequences), float64, of microbatches that fit."""
        self.scale.fill_(loss_scale)
        total = torch.zeros_like(self.graphs[0][1])
        for number, batch in enumerate(microbatches):
            for own, given in zip(_tensors(self.inputs), _tensors(batch), strict=True):
                own.copy_(given)
            graph, loss = self.graphs[min(number, 1)]
            graph.replay()
            total += loss
        return total


def _tensors(batch: PipelineInput) -> list[torch.Tensor]:
    given = batch.tokens, batch.targets, batch.mean_targets, batch.dropout.table if batch.dropout else None
    return [each for each in given if each is not None]
