"""A function of tensors as CUDA graphs, which a GPU replays while shapes stay.

`torch.cuda.graph` forbids that the host waits, copies or decides: inputs therefore lie in tensors
of their own, into which each call copies its values.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Captured:
    """CUDA graphs of a function that is called for each microbatch of an iteration: one graph of
    the first call in an iteration, and one of any later call, which may add to the results of the
    first. The constructor captures both; the method `total` replays them for the inputs of an
    iteration's calls, which must have the shapes of the capture (`fits`), and returns the sum of
    the results."""

    def __init__(
        self,
        begin: Callable[[], object],
        function: Callable[[Tensor], Tensor],
        inputs: list[Tensor],
    ) -> None:
        """Call `begin`, which starts an iteration, and twice `function(factor)`, so that everything
        is compiled and loaded; then `begin` again, and capture two calls of `function`, an
        iteration's first and any later one, as graphs, which the method `total` replays. `factor`
        is a scalar tensor, 1 here; `function` returns a tensor.

        `function` must read the tensors `inputs` themselves, into which `total` copies the inputs
        that it is given. The tensors `inputs` become zero here: a replay without that copy would be
        seen. Raises torch's RuntimeError if CUDA cannot capture the calls.
        """
        self.inputs = inputs
        self.factor = torch.ones((), device=inputs[0].device)
        for tensor in inputs:
            tensor.zero_()
        begin()
        for _ in range(2):
            function(self.factor)
        # Again, so that the captured calls are the first and the second of an iteration: the first
        # writes gradients, and any later one adds.
        begin()
        self.graphs: list[tuple[torch.cuda.CUDAGraph, Tensor]] = []
        # One pool for both, because they never run at the same time.
        pool = torch.cuda.graph_pool_handle()
        for _ in range(2):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                result = function(self.factor)
            self.graphs.append((graph, result))

    def fits(self, inputs: list[Tensor]) -> bool:
        """Return True if the tensors `inputs`, the inputs of one call, are as many and have the
        shapes as when the graphs were captured. Dtypes are not compared."""
        return [given.shape for given in inputs] == [own.shape for own in self.inputs]

    def total(self, calls: Sequence[list[Tensor]], factor: float) -> Tensor:
        """Replay the captured graphs for an iteration's calls of the function, each given as the
        list of its input tensors, in the shapes of the capture, with `factor`, the loss scale.
        Return a new tensor, the sum of the calls' results; gradients that the function writes are
        those of all calls together. Does not call `begin`: the caller does that before."""
        self.factor.fill_(factor)
        total = torch.zeros_like(self.graphs[0][1])
        for number, inputs in enumerate(calls):
            for own, given in zip(self.inputs, inputs, strict=True):
                # A graph reads fixed addresses, so inputs are copied to them.
                own.copy_(given)
            graph, result = self.graphs[min(number, 1)]
            graph.replay()
            total += result
        return total
