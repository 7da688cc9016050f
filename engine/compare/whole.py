"""Whole tensors of the optimizer's shards, to compare and to look at."""

from collections.abc import Iterator

import torch

from engine.optim.flat import FlatOptimizer
from engine.parallel.sharding import ShardedParameter


def whole_gradients(optimizer: FlatOptimizer) -> Iterator[tuple[ShardedParameter, torch.Tensor]]:
    """Each parameter's whole reduced gradient; a collective."""
    for group in optimizer.groups:
        yield from group.views(group.owners.all_gather(group.own_gradient, dim=0))


def whole_state(optimizer: FlatOptimizer) -> Iterator[tuple[ShardedParameter, str, torch.Tensor]]:
    """(parameter, name, tensor) for both moments and, in mixed precision, the master weights; a collective."""
    for group in optimizer.groups:
        for name, part in group.state.items():
            for parameter, view in group.views(group.owners.all_gather(part, dim=0)):
                yield parameter, name, view
