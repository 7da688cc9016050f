"""A function of tensors as CUDA graphs, which a GPU replays while shapes stay.

`torch.cuda.graph` forbids that the host waits, copies or decides: inputs lie in tensors of their
own, to which what differs between calls is copied.
"""

from collections.abc import Callable, Sequence

import torch


class Captured:
    """The first call of a function in an iteration, and any later one, which may add to what the
    first left."""

    def __init__(
        self,
        begin: Callable[[], object],
        function: Callable[[torch.Tensor], torch.Tensor],
        inputs: list[torch.Tensor],
    ) -> None:
        """Call `begin` and then twice `function`, of a factor, so that all is compiled and loaded;
        then capture it.

        It reads `inputs`, which become zero: a replay that did not copy its own would be seen.
        """
        self.inputs, self.factor = inputs, torch.ones((), device=inputs[0].device)
        for each in inputs:
            each.zero_()
        begin()
        for _ in range(2):
            function(self.factor)
        begin()
        self.graphs: list[tuple[torch.cuda.CUDAGraph, torch.Tensor]] = []
        pool = torch.cuda.graph_pool_handle()
        for _ in range(2):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                result = function(self.factor)
            self.graphs.append((graph, result))

    def fits(self, inputs: list[torch.Tensor]) -> bool:
        """True if the graphs take inputs of these shapes."""
        return [each.shape for each in inputs] == [each.shape for each in self.inputs]

    def total(self, calls: Sequence[list[torch.Tensor]], factor: float) -> torch.Tensor:
        """Sum of the results of an iteration's calls, by their inputs."""
        self.factor.fill_(factor)
        total = torch.zeros_like(self.graphs[0][1])
        for number, inputs in enumerate(calls):
            for own, given in zip(self.inputs, inputs, strict=True):
                own.copy_(given)
            graph, result = self.graphs[min(number, 1)]
            graph.replay()
            total += result
        return total
