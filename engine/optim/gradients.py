"""Gradients on their way to the optimizer: summed over microbatches, and reduced over data-parallel
ranks during the backward pass."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from weakref import proxy

from torch import Tensor

from mlm_repro.engine.kernels import registry
from mlm_repro.engine.kernels.products import ADD_PRODUCT, add_product
from mlm_repro.engine.optim.flat import FlatGroup
from mlm_repro.engine.parallel.mesh import ParallelMesh, Pending
from mlm_repro.engine.parallel.sharding import Role, ShardedParameter

BUCKET_ELEMENTS = 4_000_000
"""Least number of elements in a bucket, a slice of the flat gradient that is reduced together; the
last bucket of a group may be smaller."""
OF_RANK = 1_000_000
"""Least number of elements in a bucket for each data-parallel rank, whose share of the reduction
must fill a link."""


@dataclass
class _Bucket:
    """A contiguous slice of the flat gradient with the gradients of one or several parameters. It
    is summed over data-parallel ranks as soon as the last of these gradients has come, or, if other
    ranks of the replica hold terms of them, at the end of the iteration; the last stage's copy of
    the embedding is not summed over data-parallel ranks."""

    gradient: Tensor
    size: int
    """Number of parameters whose gradients are in the bucket."""
    is_shared: bool
    """True if other ranks of the same replica hold terms of these gradients, so that the bucket is
    reduced over data-parallel ranks only at the end."""
    is_copy: bool
    """True for the last stage's copy of the tied embedding, whose gradient the first stage reduces
    for both."""
    owned: list[tuple[int, Tensor]]
    """Pairs of a data-parallel rank and the slice of the bucket's gradient whose sum this rank
    alone needs; empty if every rank needs the whole sum."""
    missing: int = 0
    """Number of the bucket's parameters whose last gradient in the iteration is still to come."""
    works: list[Pending] = field(default_factory=list)
    """Pendings of the bucket's reduction in this iteration; empty before it starts."""
    is_launched: bool = False
    """True if the reduction in this iteration has been started, or left out for a copy."""


@dataclass
class GradientReducer:
    """Reducer of one rank's gradients: brings them from the model to the optimizer's flat groups,
    by hooks that it registers on the parameters, and sums them over ranks. In each iteration the
    caller calls `begin` before the first backward pass, `arm` with a chunk's parameters before the
    last backward pass of that chunk, and `finish` after all; if it replays recorded passes, which
    run no hooks, it adds to `arrived` instead of calling `arm`. The sums stay undivided: `finish`
    sets the divisor by which the optimizer divides them.

    A parameter's first gradient in an iteration is copied into the flat gradient, and later
    microbatches are added; in mixed precision on a GPU the product that computes a weight's
    gradient writes there itself. In the last backward pass of a chunk each bucket's all-reduce
    starts when its last parameter has its gradient, unless other ranks of the replica hold terms of
    it; then `finish` starts it. Under ZeRO stage 1 a bucket's slices are reduced to their owners
    alone, a reduce-scatter (Rajbhandari et al. 2020, Section 7); the tied embedding's sum goes to
    every rank.
    """

    groups: Sequence[FlatGroup]
    mesh: ParallelMesh
    _buckets: list[_Bucket] = field(default_factory=list)
    _armed: set[int] = field(default_factory=set)
    """Identities (`id`) of the parameters whose next gradient is the last in this iteration."""
    arrived: set[int] = field(default_factory=set)
    """Identities (`id`) of the parameters that have had a gradient in this iteration."""

    def __post_init__(self) -> None:
        for group in self.groups:
            for members in _in_buckets(group.gradients, self._is_tied, self.mesh.dp.size):
                (first, first_view), (_, last_view) = members[0], members[-1]
                start = int(first_view.storage_offset())
                end = int(last_view.storage_offset()) + last_view.numel()
                bucket = _Bucket(
                    group.main_gradient[start:end],
                    len(members),
                    any(
                        self._is_tied(parameter) or self._is_summed(parameter)
                        for parameter, _ in members
                    ),
                    self._is_tied(first) and first.is_copy,
                    group.owned(start, end)
                    if group.owners.size > 1 and not self._is_tied(first)
                    else [],
                )
                self._buckets.append(bucket)
                for parameter, view in members:
                    # Not bound to this object: torch keeps a hook where the garbage collector sees
                    # no circle, and everything that a training made would stay.
                    hook = partial(GradientReducer._take, proxy(self), bucket, view, group.is_mixed)
                    parameter.local.register_post_accumulate_grad_hook(hook)
                    # Weights of products alone: their gradient is a product, which can add to fp32
                    # without a 16-bit result in between. `linear` finds the function on the weight.
                    if (
                        group.is_mixed
                        and registry.on_gpu(self.mesh.device)
                        and "weight" in parameter.role.value
                    ):
                        vars(parameter.local)[ADD_PRODUCT] = partial(
                            self._add, bucket, view, id(parameter.local)
                        )

    def begin(self) -> None:
        """Prepare the reducer for the first backward pass of an iteration: the field `grad` of each
        parameter becomes None, and no gradient counts as arrived. The flat gradients stay until new
        ones overwrite them."""
        self._armed.clear()
        self.arrived.clear()
        for parameter, _ in self._gradients():
            # So that autograd hands over the first gradient instead of adding it to the last
            # iteration's.
            parameter.local.grad = None
        for bucket in self._buckets:
            bucket.missing = bucket.size
            bucket.works = []
            bucket.is_launched = False

    def arm(self, parameters: Sequence[ShardedParameter]) -> None:
        """Mark these parameters before a backward pass: the next gradient of each is its last in
        this iteration, after which the reduction of its bucket may start."""
        self._armed.update(id(parameter.local) for parameter in parameters)

    def finish(self, divisor: float) -> None:
        """Complete the reduction of an iteration's gradients, in place. Every rank calls it. The
        gradients are then sums over microbatches and data-parallel ranks, zero for a parameter that
        got none; the optimizer divides them by `FlatGroup.divisor`, set here to `divisor` times the
        number of data-parallel ranks.

        If the optimizer is divided, only the slice that this rank owns is valid afterwards.
        Gradients that ranks of one replica share are summed over these ranks too: the tied
        embedding's, on the first and the last stage, and with sequence parallelism each undivided
        parameter's, because a tensor-parallel rank saw only its part of the sequence.
        """
        for parameter, view in self._gradients():
            if id(parameter.local) not in self.arrived:
                # Not zeroed at the start of an iteration, which would be another pass: the first
                # gradient overwrites the last iteration's.
                view.zero_()
        self._wait([bucket for bucket in self._buckets if not bucket.is_shared])
        # Before the shared buckets: the sum of one data-parallel rank has to be complete before it
        # joins the others'.
        tied = self._share()
        self._wait([bucket for bucket in self._buckets if bucket.is_shared])
        # The first stage reduced for both, so that both copies of the embedding get the same bits.
        for view in tied:
            self.mesh.embedding.broadcast(view)
        for group in self.groups:
            group.divisor = divisor * self.mesh.dp.size

    def _share(self) -> list[Tensor]:
        """Sum in place, over the ranks of one replica, the gradients of parameters that several of
        these ranks hold; all of these ranks call it. Return a list of views of the tied embedding's
        gradients that only the first stage has summed, which the caller broadcasts to the last
        stage; with one data-parallel rank both stages sum, and the list is empty."""
        tied = []
        for parameter, view in self._gradients():
            if self._is_tied(parameter):
                if self.mesh.dp.size == 1:
                    # With one replica there is nothing else to sum, and both stages add up at once.
                    self.mesh.embedding.all_reduce(view)
                else:
                    work = self.mesh.embedding.start_reduce(view, 0)
                    with self.mesh.waiting:
                        work.wait()
                    tied.append(view)
            if self._is_summed(parameter):
                self.mesh.tp.all_reduce(view)
        return tied

    def _gradients(self) -> Iterator[tuple[ShardedParameter, Tensor]]:
        return chain.from_iterable(group.gradients for group in self.groups)

    def _is_tied(self, parameter: ShardedParameter) -> bool:
        return parameter.role is Role.TIED_EMBEDDING and self.mesh.embedding.size > 1

    def _is_summed(self, parameter: ShardedParameter) -> bool:
        return self.mesh.sequence_parallel and parameter.dim is None

    def _take(self, bucket: _Bucket, main: Tensor, is_mixed: bool, parameter: Tensor) -> None:
        """Hook that autograd calls when a parameter's gradient is in `parameter.grad`: copy the
        gradient to its slice `main` of the flat gradient, or add it after the first microbatch, and
        let `parameter.grad` be `main`, or None in mixed precision (`is_mixed`). If it was the last
        gradient of the iteration (the method `arm`) that the bucket lacked, start the bucket's
        reduction, unless the bucket is shared. Nothing is returned."""
        gradient = parameter.grad
        # Without mixed precision autograd itself adds to the view after the first microbatch.
        if gradient is not None and gradient is not main:
            if id(parameter) in self.arrived:
                main.add_(gradient)
            elif gradient.is_sparse:
                # Only the rows that were looked up; the others have no gradient.
                main.zero_().add_(gradient)
            else:
                main.copy_(gradient)
            # A 16-bit gradient is dropped at once: all of them together would be as large as the
            # weights.
            parameter.grad = None if is_mixed else main
            self.arrived.add(id(parameter))
        self._count(bucket, id(parameter))

    def _add(self, bucket: _Bucket, main: Tensor, key: int, a: Tensor, b: Tensor) -> None:
        """Write the product a·b, a weight's gradient, to `main`, the weight's slice of the flat
        gradient, in fp32, or add it there after the first microbatch. If the method `arm` has
        marked this gradient as the weight's last in the iteration, and the bucket lacks no other,
        start the bucket's reduction, unless the bucket is shared. `key` is the weight's identity
        (`id`). A product calls this in its backward pass instead of handing a gradient to the
        hook."""
        add_product(main, a, b, key in self.arrived)
        self.arrived.add(key)
        self._count(bucket, key)

    def _count(self, bucket: _Bucket, key: int) -> None:
        if key in self._armed:
            bucket.missing -= 1
            # A shared bucket is not complete before the other stages or tensor-parallel ranks have
            # added theirs.
            if bucket.missing == 0 and not bucket.is_shared:
                self._launch(bucket)

    def _launch(self, bucket: _Bucket) -> None:
        """Start to sum the gradients of a bucket, a slice of the flat gradient, over the
        data-parallel ranks, in place: each of the slices in `bucket.owned` on its owner alone, or,
        if that list is empty, the whole bucket on every rank. Nothing is started if this was done
        before, or if the bucket is a copy that another stage reduces. The Pendings to wait for are
        kept in `bucket.works`."""
        if not bucket.is_launched and not bucket.is_copy:
            dp = self.mesh.dp
            bucket.works = [dp.start_reduce(part, owner) for owner, part in bucket.owned]
            bucket.works = bucket.works or [dp.start_all_reduce(bucket.gradient)]
        bucket.is_launched = True

    def _wait(self, buckets: Sequence[_Bucket]) -> None:
        for bucket in buckets:
            self._launch(bucket)
        with self.mesh.waiting:
            for work in chain.from_iterable(bucket.works for bucket in buckets):
                work.wait()


def _in_buckets(
    gradients: Sequence[tuple[ShardedParameter, Tensor]],
    is_alone: Callable[[ShardedParameter], bool],
    dp: int,
) -> list[list[tuple[ShardedParameter, Tensor]]]:
    """Return the pairs of parameter and gradient, which come in flat order, cut into buckets, as a
    list of lists. A bucket ends with the parameter by which it has at least 4 million elements, or
    1 million for each of the `dp` data-parallel ranks if that is more. A parameter for which the
    function `is_alone` returns True has a bucket of its own, and the bucket before it may be
    smaller, as the last one may."""
    buckets: list[list[tuple[ShardedParameter, Tensor]]] = []
    # At the least size, so that the first parameter opens a bucket.
    count = least = max(BUCKET_ELEMENTS, OF_RANK * dp)
    for parameter, view in gradients:
        if count >= least or is_alone(parameter):
            buckets.append([])
            count = 0
        buckets[-1].append((parameter, view))
        # Full at once, so that the next parameter opens another bucket.
        count += least if is_alone(parameter) else view.numel()
    return buckets
