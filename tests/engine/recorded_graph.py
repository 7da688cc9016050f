"""A CUDA graph's rules on CPU tensors: what is captured is recorded operation by operation, and
replayed in place.

Recording refuses what `torch.cuda.graph` does: numbers that the host reads, and tensors that it
makes from its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

REFUSED = {"_local_scalar_dense", "lift_fresh", "pin_memory", "nonzero", "masked_select", "equal"}
"""Operations that wait for a GPU, or copy from the host."""


class RecordedGraph:
    def __init__(self) -> None:
        self.steps: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        with torch._C._AutoDispatchBelowAutograd():
            for function, arguments, options, results in self.steps:
                again = function(*arguments, **options)
                for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and place(old) != place(new):
                        old.copy_(new)


def place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Recording(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name in REFUSED:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        results = function(*arguments, **(options or {}))
        if not name.startswith(("empty", "new_empty")):
            self.graph.steps.append((function, arguments, options or {}, results))
        return results


def record_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put recordings in the place of torch's CUDA graphs; interpreted kernels are recorded too."""
    from triton.runtime.interpreter import InterpretedFunction

    recorded: list[RecordedGraph] = []
    run = InterpretedFunction.run

    def launch(self: Any, *arguments: Any, **options: Any) -> None:
        with _disable_current_modes():
            run(self, *arguments, **options)
        if recorded:
            recorded[-1].steps.append(
                (lambda *a, **o: run(self, *a, **o), arguments, options, None)
            )

    @contextmanager
    def capture(graph: RecordedGraph, pool: object) -> Iterator[None]:
        recorded.append(graph)
        try:
            with Recording(graph):
                yield
        finally:
            recorded.clear()

    monkeypatch.setattr(InterpretedFunction, "run", launch)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
