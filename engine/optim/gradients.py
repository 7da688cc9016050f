"""Gradients on their way to the optimizer: added up in fp32, reduced over data-parallel ranks during backward."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Protocol

import torch
import torch.distributed as dist

from engine.optim.flat import FlatGroup
from engine.parallel.mesh import ParallelMesh, sum_in_tree
from engine.parallel.sharding import TIED_EMBEDDING, ShardedParameter

BUCKET_ELEMENTS = 4_000_000
"""Least number of elements reduced at a time: large enough to reach the links' bandwidth, small enough to overlap."""


class Reducer(Protocol):
    """What takes a model's gradients to the optimizer."""

    local_square: torch.Tensor

    def begin(self, sequences: int = 1) -> None:
        """Before the first backward pass of an iteration on so many sequences."""

    def arm(self, parameters: Sequence[ShardedParameter]) -> None:
        """The next gradient of each of these parameters is its last in this iteration."""

    def finish(self, divisor: float) -> None:
        """Every gradient is the sum over microbatches and the mean over ranks, divided by `divisor`.

        Where the optimizer is divided that holds of the part that this rank owns; the rest is not defined.
        """


@dataclass
class _Bucket:
    """A contiguous part of a group's flat gradient, reduced as soon as the last of its parameters is done."""

    gradient: torch.Tensor
    size: int
    counted: list[torch.Tensor]
    """The gradients in it that this rank counts in sums over the model's ranks."""
    is_shared: bool
    """Whether parts of it come from other ranks of the model first: then it is reduced at the end."""
    is_copy: bool
    """Whether it is the last stage's tied embedding, which the first stage reduces for both."""
    owned: list[tuple[int, torch.Tensor]]
    """Its parts by the data-parallel rank that alone needs their sum; none where every rank needs all of it."""
    waiting: int = 0
    works: list[dist.Work] = field(default_factory=list)
    is_launched: bool = False


@dataclass
class GradientReducer:
    """Watches the parameters of one rank's flat groups.

    An iteration's first gradient of a parameter becomes the flat one's part, those of later microbatches are added as
    they are made. Where the mesh is `in_order`, those of single sequences are added in a binary tree over their places
    in the global batch, with as many partial sums as it is high. In the last backward pass of a chunk (`arm`) each
    bucket's all-reduce starts when its last parameter has its gradient; not where ranks share memory, for there the
    processor that would carry it out is the one that computes. Under ZeRO stage 1 a bucket's parts are reduced to their
    owners alone, a reduce-scatter (Rajbhandari et al. 2020, Section 7); the tied embedding's sum goes to every rank.
    With `measures_noise`, `local_square` is known after `finish`.
    """

    groups: Sequence[FlatGroup]
    mesh: ParallelMesh
    measures_noise: bool = False
    _buckets: list[_Bucket] = field(default_factory=list)
    _armed: set[int] = field(default_factory=set)
    _arrivals: dict[int, int] = field(default_factory=dict)
    """How many gradients a parameter has had in this iteration."""
    _partial: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Of each parameter the sums that wait for what is to be added to them."""
    _merges: list[int] = field(default_factory=list)
    """How many sums are added up after each sequence's gradient."""

    def __post_init__(self) -> None:
        for group in self.groups:
            for members in _in_buckets(group.gradients, self._is_tied):
                (first, first_view), (_, last_view) = members[0], members[-1]
                start, end = int(first_view.storage_offset()), int(last_view.storage_offset()) + last_view.numel()
                is_divided = group.owners.size > 1 and not self._is_tied(first)
                bucket = _Bucket(
                    group.main_gradient[start:end],
                    len(members),
                    [view for parameter, view in members if parameter.is_counted],
                    not self.mesh.in_order and any(self._is_tied(p) or self._is_summed(p) for p, _ in members),
                    not self.mesh.in_order and any(self._is_tied(p) and p.is_copy for p, _ in members),
                    group.owned(start, end) if is_divided else [],
                )
                self._buckets.append(bucket)
                for parameter, view in members:
                    hook = partial(self._arrived, bucket, view, group.is_mixed)
                    parameter.local.register_post_accumulate_grad_hook(hook)
        self.local_square = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        """Squared norm of this data-parallel rank's own gradient before the others' are added, float64: what this rank
        counts of it, to be summed over the tensor- and pipeline-parallel axes."""

    def begin(self, sequences: int = 1) -> None:
        self._armed.clear()
        self._arrivals.clear()
        self._partial.clear()
        self._merges = merges_in_tree(sequences) if self.mesh.in_order else []
        self.local_square.zero_()
        for parameter, _ in self._gradients():
            parameter.local.grad = None
        for bucket in self._buckets:
            bucket.waiting, bucket.works, bucket.is_launched = bucket.size, [], False

    def arm(self, parameters: Sequence[ShardedParameter]) -> None:
        self._armed.update(id(parameter.local) for parameter in parameters)

    def finish(self, divisor: float) -> None:
        """Reduce what is left, add up what is shared between the model's ranks, and divide by `divisor` × dp.

        Shared are the tied embedding, held by the first and the last stage, and with sequence parallelism every
        undivided parameter, of which each tensor-parallel rank saw its part of the sequence. The parts of one
        data-parallel rank are added up before those of the others; where there are others, the first stage hands the
        last its sum with theirs.
        """
        for parameter, view in self._gradients():
            if id(parameter.local) not in self._arrivals:
                view.zero_()
        self._wait([bucket for bucket in self._buckets if not bucket.is_shared])
        tied = [] if self.mesh.in_order else self._share()
        self._wait([bucket for bucket in self._buckets if bucket.is_shared])
        for view in tied:
            self.mesh.embedding.broadcast(view)
        if self.mesh.in_order:
            self._tie()
        self.local_square.div_(divisor**2)
        if (shares := divisor * self.mesh.dp.size) != 1:
            for group in self.groups:
                group.main_gradient.div_(shares)

    def _share(self) -> list[torch.Tensor]:
        """Add up shared gradients; returns the tied embedding's where only the first stage has the sum."""
        tied = []
        for parameter, view in self._gradients():
            if self._is_tied(parameter) and self.mesh.dp.size == 1:
                self.mesh.embedding.all_reduce(view)
            elif self._is_tied(parameter):
                self.mesh.embedding.reduce(view)
                tied.append(view)
            if self._is_summed(parameter):
                self.mesh.tp.all_reduce(view)
        return tied

    def _tie(self) -> None:
        """Add up the tied embedding's sums of input and output, each over all sequences."""
        if uses := [view for parameter, view in self._gradients() if self._is_tied(parameter)]:
            total = self.mesh.embedding.all_reduce(sum_in_tree(uses).clone())
            for view in uses:
                view.copy_(total)

    def _gradients(self) -> Iterator[tuple[ShardedParameter, torch.Tensor]]:
        return chain.from_iterable(group.gradients for group in self.groups)

    def _is_tied(self, parameter: ShardedParameter) -> bool:
        return parameter.name == TIED_EMBEDDING and (self.mesh.embedding.size > 1 or self.mesh.in_order)

    def _is_summed(self, parameter: ShardedParameter) -> bool:
        return self.mesh.sequence_parallel and parameter.dim is None and not self.mesh.in_order

    def _arrived(self, bucket: _Bucket, main: torch.Tensor, is_mixed: bool, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and parameter.grad is not main:
            count = self._arrivals.get(id(parameter), 0)
            sums = self._partial.setdefault(id(parameter), [main])
            merges = self._merges[count] if self._merges else min(count, 1)
            if count:
                sums.append(parameter.grad if merges else parameter.grad.to(main.dtype))
            elif parameter.grad.is_sparse:
                main.zero_().add_(parameter.grad)
            else:
                main.copy_(parameter.grad)
            for _ in range(merges):
                right = sums.pop()
                sums[-1].add_(right)
            self._arrivals[id(parameter)] = count + 1
            parameter.grad = None if is_mixed or self._merges else main
        if id(parameter) in self._armed:
            bucket.waiting -= 1
            if bucket.waiting == 0 and not bucket.is_shared and not self._waits:
                self._launch(bucket)

    def _launch(self, bucket: _Bucket) -> None:
        if not bucket.is_launched and not bucket.is_copy:
            if self.measures_noise and bucket.counted:
                self.local_square += torch.nn.utils.get_total_norm(bucket.counted).double() ** 2
            if self.mesh.dp.size > 1:
                bucket.works = self._reduce(bucket)
        bucket.is_launched = True

    def _reduce(self, bucket: _Bucket) -> list[dist.Work]:
        """Begin to add up the bucket over data-parallel ranks; what is to be waited for."""
        dp = self.mesh.dp
        if self._waits:
            for owner, part in bucket.owned:
                dp.reduce(part, owner)
            if not bucket.owned:
                dp.all_reduce(bucket.gradient)
            return []
        works = [dist.reduce(part, group=dp.group, group_dst=owner, async_op=True) for owner, part in bucket.owned]
        return works or [dist.all_reduce(bucket.gradient, group=dp.group, async_op=True)]

    @property
    def _waits(self) -> bool:
        """Whether a reduction is over when it returns."""
        return self.mesh.dp.shared_memory is not None or self.mesh.dp.in_order

    def _wait(self, buckets: Sequence[_Bucket]) -> None:
        for bucket in buckets:
            self._launch(bucket)
        with self.mesh.waiting:
            for work in chain.from_iterable(bucket.works for bucket in buckets):
                work.wait()


def merges_in_tree(count: int) -> list[int]:
    """How many sums are added up after each of `count` numbers in a tree of halves; an odd number's last comes last."""
    if count == 1:
        return [0]
    first = count // 2 if count % 2 == 0 else count - 1
    left, right = merges_in_tree(first), merges_in_tree(count - first)
    return [*left, *right[:-1], right[-1] + 1]


def _in_buckets(
    gradients: Sequence[tuple[ShardedParameter, torch.Tensor]], is_alone: Callable[[ShardedParameter], bool]
) -> list[list[tuple[ShardedParameter, torch.Tensor]]]:
    """Neighbours in the flat order, in runs of at least BUCKET_ELEMENTS; what `is_alone` has a bucket of its own."""
    buckets: list[list[tuple[ShardedParameter, torch.Tensor]]] = []
    count = BUCKET_ELEMENTS
    for parameter, view in gradients:
        if count >= BUCKET_ELEMENTS or is_alone(parameter):
            buckets.append([])
            count = 0
        buckets[-1].append((parameter, view))
        count += BUCKET_ELEMENTS if is_alone(parameter) else view.numel()
    return buckets
