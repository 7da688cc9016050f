"""Gradients on their way to the optimizer: added up in fp32, reduced over data-parallel ranks during backward."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from engine.optim.flat import FlatGroup
from engine.parallel.mesh import ParallelMesh
from engine.parallel.sharding import TIED_EMBEDDING, ShardedParameter

BUCKET_ELEMENTS = 4_000_000
"""Least number of elements reduced at a time: large enough to reach the links' bandwidth, small enough to overlap."""


@dataclass
class _Bucket:
    """A contiguous part of a group's flat gradient, reduced as soon as the last of its parameters is done."""

    gradient: torch.Tensor
    size: int
    waiting: int = 0
    work: dist.Work | None = None
    is_launched: bool = False


@dataclass
class GradientReducer:
    """Watches the parameters of one rank's flat groups.

    A microbatch's gradient is added to the fp32 one as it is made. In the last backward pass of a chunk (`arm`) each
    bucket's all-reduce starts when its last parameter has its gradient.
    """

    groups: Sequence[FlatGroup]
    mesh: ParallelMesh
    _buckets: list[_Bucket] = field(default_factory=list)
    _armed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        for group in self.groups:
            views = dict(zip(map(id, group.parameters), group.views(group.main_gradient), strict=True))
            for members in _in_buckets(group.parameters):
                first, last = members[0], members[-1]
                start = views[id(first)].storage_offset()
                end = views[id(last)].storage_offset() + views[id(last)].numel()
                bucket = _Bucket(group.main_gradient[start:end], len(members))
                self._buckets.append(bucket)
                for parameter in members:
                    hook = partial(self._arrived, bucket, views[id(parameter)], group.is_mixed)
                    parameter.local.register_post_accumulate_grad_hook(hook)

    def begin(self) -> None:
        """Before an iteration's first backward pass."""
        self._armed.clear()
        for bucket in self._buckets:
            bucket.waiting, bucket.work, bucket.is_launched = bucket.size, None, False

    def arm(self, parameters: Sequence[ShardedParameter]) -> None:
        """The next gradient of each of these parameters is its last in this iteration."""
        self._armed.update(id(parameter.local) for parameter in parameters)

    def finish(self, divisor: float) -> None:
        """Wait for every bucket, add up what is shared between ranks, and divide by `divisor` × dp.

        Shared are the tied embedding, held by the first and the last stage, and with sequence parallelism every
        undivided parameter, of which each tensor-parallel rank saw its part of the sequence.
        """
        for bucket in self._buckets:
            self._launch(bucket)
            if bucket.work is not None:
                bucket.work.wait()
        for group in self.groups:
            for parameter, view in zip(group.parameters, group.views(group.main_gradient), strict=True):
                if parameter.name == TIED_EMBEDDING:
                    self.mesh.embedding.all_reduce(view)
                if self.mesh.sequence_parallel and parameter.dim is None:
                    self.mesh.tp.all_reduce(view)
            if (shares := divisor * self.mesh.dp.size) != 1:
                group.main_gradient.div_(shares)

    def _arrived(self, bucket: _Bucket, main: torch.Tensor, is_mixed: bool, parameter: torch.Tensor) -> None:
        if is_mixed and parameter.grad is not None:
            main.add_(parameter.grad)
            parameter.grad.zero_()
        if id(parameter) in self._armed:
            bucket.waiting -= 1
            if bucket.waiting == 0:
                self._launch(bucket)

    def _launch(self, bucket: _Bucket) -> None:
        if not bucket.is_launched and self.mesh.dp.size > 1:
            bucket.work = dist.all_reduce(bucket.gradient, group=self.mesh.dp.group, async_op=True)
        bucket.is_launched = True


def _in_buckets(parameters: Sequence[ShardedParameter]) -> list[list[ShardedParameter]]:
    """Neighbours in the flat order, in runs of at least BUCKET_ELEMENTS."""
    buckets: list[list[ShardedParameter]] = [[]]
    count = 0
    for parameter in parameters:
        if count >= BUCKET_ELEMENTS:
            buckets.append([])
            count = 0
        buckets[-1].append(parameter)
        count += parameter.local.numel()
    return buckets
