"""Base of the optimizers: flat storage with fp32 master weights, clipping, and state by parameter
name."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from mlm_repro.engine.config import TrainConfig
from mlm_repro.engine.kernels import registry
from mlm_repro.engine.kernels.adam import AdamStep
from mlm_repro.engine.parallel.mesh import Axis, LoneAxis, ParallelMesh
from mlm_repro.engine.parallel.sharding import ShardedParameter

Written = list[tuple[str, ShardedParameter, int, Callable[[], Tensor | None]]]
"""Type of a list of an optimizer's tensors for a checkpoint, each as a tuple: name,
ShardedParameter, data-parallel rank that writes it, and a function that returns the tensor on that
rank and None on the others."""


class FlatGroup:
    """Parameters with one weight decay, which become views of one flat tensor, `flat`, when the
    group is made, and room for their gradients in another, `main_gradient`, with its views in
    `gradients`. The group leaves a parameter's own `grad` alone: a GradientReducer brings gradients
    over.

    In fp16 and bf16, unless `is_pure`, the optimizer works on fp32 copies and has the gradient in
    fp32. The optimizer's part, `master` and its moments, is divided over `owners` in equal slices,
    for which zeros fill up the flat tensors; an axis of size 1 keeps it whole. After reduction only
    the owner's slice of the gradient is valid.
    """

    def __init__(
        self, parameters: list[ShardedParameter], weight_decay: float, owners: Axis, is_pure: bool
    ) -> None:
        self.parameters = parameters
        self.weight_decay = weight_decay
        self.owners = owners
        first = parameters[0].local
        # Rounded up, so that all owners have equal slices; zeros at the end belong to no parameter.
        size = -(-sum(p.local.numel() for p in parameters) // owners.size)
        self.flat = torch.zeros(size * owners.size, dtype=first.dtype, device=first.device)
        for parameter, value in self.views(self.flat):
            value.copy_(parameter.local.data)
            # The model computes with views of the flat tensor, so that an update needs no copy
            # back.
            parameter.local.data = value
        self.is_mixed = first.dtype in (torch.float16, torch.bfloat16) and not is_pure
        self.own = slice(owners.rank * size, (owners.rank + 1) * size)
        self.master = self.flat[self.own].float() if self.is_mixed else self.flat[self.own]
        self.own_copy = self.flat[self.own] if self.is_mixed else None
        """Slice of the model's flat weights that this owner updates, a copy of `master` in 16 bits;
        None if it is `master` itself."""
        # In fp32 in mixed precision: a 16-bit sum over microbatches would lose its small terms.
        self.main_gradient = torch.zeros_like(self.flat, dtype=self.master.dtype)
        self.divisor = 1.0
        """Number by which `main_gradient` is still to be divided; on a GPU the update divides in
        its own pass."""
        self.gradients = list(self.views(self.main_gradient))
        """List of pairs of a ShardedParameter and its view of `main_gradient`, in the group's
        order."""
        self.exp_avg = torch.zeros_like(self.master)
        self.exp_avg_sq = torch.zeros_like(self.master)

    @property
    def state(self) -> dict[str, Tensor]:
        """Dict of this owner's part of the group's state, as checkpoints keep it: the flat tensors
        themselves, not copies, by name, `exp_avg`, `exp_avg_sq` and in mixed precision `master`."""
        moments = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return moments | ({"master": self.master} if self.is_mixed else {})

    @property
    def own_gradient(self) -> Tensor:
        """Flat tensor, a view: this owner's slice of the gradient. The whole `main_gradient` is
        first divided by `divisor`, which becomes 1."""
        if self.divisor != 1:
            self.main_gradient.div_(self.divisor)
            self.divisor = 1.0
        return self.main_gradient[self.own]

    def publish(self) -> None:
        """Gather into the attribute `flat`, in place, the weights that the other ranks of the
        attribute `owners`, an axis, have updated; the model computes with `flat`. Every rank of
        `owners` calls it, after the update of its own slice of `flat`; if the axis has one rank,
        nothing happens."""
        if self.owners.size > 1:
            self.flat.copy_(self.owners.all_gather(self.flat[self.own], dim=0))

    def views(self, flat: Tensor) -> Iterator[tuple[ShardedParameter, Tensor]]:
        """Yield pairs of each parameter of the group, in order, and its view of the argument
        `flat`, a flat tensor laid out as the group's own `flat`, in the parameter's shape."""
        for parameter, start, end in self.starts():
            yield parameter, flat[start:end].view(parameter.local.shape)

    def owned(self, start: int, end: int) -> list[tuple[int, Tensor]]:
        """Return the gradient of the flat tensor's elements from `start` to `end`, without `end`,
        as a list of pairs of an owner and a slice, a view of the gradient, in order. The owner is
        the index, on the group's attribute `owners`, an axis, of the rank that updates the slice's
        weights."""
        size = self.own.stop - self.own.start
        cuts = [
            (owner, max(start, owner * size), min(end, owner * size + size))
            for owner in range(self.owners.size)
        ]
        return [
            (owner, self.main_gradient[first:last]) for owner, first, last in cuts if first < last
        ]

    def starts(self) -> Iterator[tuple[ShardedParameter, int, int]]:
        """Yield for each parameter of the group, in order, a triple: the ShardedParameter and the
        range of its elements in the flat tensor, the first index and the last plus one."""
        end = 0
        for parameter in self.parameters:
            start = end
            end = end + parameter.local.numel()
            yield parameter, start, end

    def pieces(self, own: Tensor) -> list[Tensor]:
        """Return this owner's elements of each parameter of the group, in order, as a list of flat
        slices, which are views, of `own`, a flat tensor laid out as the attribute `master`. A slice
        is empty if other owners have the whole parameter."""
        return [self.piece(own, start, end) for _, start, end in self.starts()]

    def piece(self, own: Tensor, start: int, end: int) -> Tensor:
        """Return this owner's elements in the range [start, end) of the whole flat tensor, as a
        slice, a view, of `own`, a flat tensor laid out as the attribute `master`. It is empty if
        other owners have the whole range."""
        first = self.own.start
        return own[max(start - first, 0) : max(end - first, 0)]


class FlatOptimizer(ABC):
    """Base of the optimizers: a subclass defines the method `update`, which updates the moments and
    weights of one group of parameters from its gradient. This class groups the parameters by weight
    decay; `gradient_norm` returns the gradient's global norm; `step` takes it, clips by it and
    updates all groups; `written` gives the state to a checkpoint, and `restore` takes it from one.
    Every rank makes one and calls its methods in the same order."""

    def __init__(
        self,
        parameters: list[ShardedParameter],
        train: TrainConfig,
        mesh: ParallelMesh,
        shard: bool = False,
    ) -> None:
        """Group `parameters` by their roles into the ones with the weight decay of `train` and the
        ones without, and make their values views of flat tensors: the attribute `groups` is a list
        of one or two FlatGroups. The number of steps begins at 0. With `shard` the state is divided
        over the data-parallel ranks of `mesh` (ZeRO stage 1)."""
        self.mesh = mesh
        self.train = train
        owners = mesh.dp if shard else LoneAxis()
        is_pure = train.precision == "fp16-pure"
        self.groups = []
        # Two groups, because weight decay is one number of an update.
        for is_decayed, decay in ((True, train.weight_decay), (False, 0.0)):
            if chosen := [p for p in parameters if p.role.is_decayed == is_decayed]:
                self.groups.append(FlatGroup(chosen, decay, owners, is_pure))
        self.steps = 0

    @abstractmethod
    def update(self, group: FlatGroup, step: AdamStep) -> None:
        """Update a group's moments and `master` in place from its gradient, this owner's slices
        alone, and copy `master` to `own_copy` unless that is None; every optimizer defines this.
        `step` has the learning rate and the other numbers of the step. The gradient is yet to be
        multiplied by `step.clipping`, and to be divided by `group.divisor` unless it is read as
        `own_gradient`. Every rank calls it; the caller gathers the other owners' weights."""

    def gradient_norm(self) -> Tensor:
        """Return the norm of the whole gradient, divided by its divisor and not yet clipped, over
        all ranks, counting shared parameters once: a float64 scalar tensor, the same on every rank.
        Every rank calls it, after the gradients were reduced. On CPUs the gradient itself is
        divided, in place; on a GPU it stays undivided."""
        device = self.groups[0].master.device
        own = [
            # On a GPU the gradient stays undivided, and the norm is divided instead.
            group.main_gradient[group.own] if registry.on_gpu(device) else group.own_gradient
            for group in self.groups
        ]
        counted = self._counted(own)
        squares = torch.zeros((), dtype=torch.float64, device=device)
        if counted:
            squares += torch.nn.utils.get_total_norm(counted).double() ** 2
        return self._over_ranks(squares).sqrt() / self.groups[0].divisor

    def _counted(self, flats: list[Tensor]) -> list[Tensor]:
        """Return a list of this owner's elements of the parameters, as far as this rank counts
        them, so that no element of the model is counted on two ranks: slices, which are views, of
        `flats`, a list of a tensor for each group, laid out as the group's `master`. Empty slices
        are left out."""
        counted = []
        for group, flat in zip(self.groups, flats, strict=True):
            for parameter, piece in zip(group.parameters, group.pieces(flat), strict=True):
                if parameter.is_counted and piece.numel():
                    counted.append(piece)
        return counted

    def _over_ranks(self, sums: Tensor) -> Tensor:
        # Not over data-parallel ranks as such: replicas hold the same sum, and only owners hold
        # parts.
        for axis in (self.groups[0].owners, self.mesh.tp, self.mesh.pp):
            axis.all_reduce(sums)
        return sums

    @torch.no_grad()
    def step(self, learning_rate: float, gradient_norm: float) -> None:
        """Count the step, clip the gradient to the norm `train.clip_gradient`, or not if that is 0,
        and update the moments, the master weights and the model's weights in place with the rate
        `learning_rate`. `gradient_norm` is the value that the method of that name returns. Every
        rank calls it, after the gradients were reduced."""
        self.steps += 1
        train = self.train
        limit = self.train.clip_gradient
        # With the 1e-6 of torch and Megatron-LM, to clip as they do.
        clipping = limit / (gradient_norm + 1e-6) if limit and gradient_norm > limit else 1.0
        constants = train.adam_beta1, train.adam_beta2, train.adam_epsilon
        for group in self.groups:
            self.update(
                group, AdamStep(learning_rate, *constants, group.weight_decay, clipping, self.steps)
            )
            group.publish()

    def try_step(self) -> None:
        """Run one update with learning rate 0, so that the memory of an update is allocated, then
        reset moments and step count; the weights stay. Overwrites the gradients. Every rank calls
        it, before the first step only."""
        for group in self.groups:
            group.main_gradient.fill_(1)
        self.step(learning_rate=0.0, gradient_norm=0.0)
        for group in self.groups:
            for tensor in (group.exp_avg, group.exp_avg_sq):
                tensor.zero_()
        self.steps = 0

    def written(self) -> Written:
        """Return the optimizer's tensors for a checkpoint as a list of tuples, without a last
        stage's copy of the embedding: for each tensor its name, such as `exp_avg.NAME`, its
        ShardedParameter, the data-parallel rank that writes it, and a function that returns the
        tensor, in the shape of the parameter's `local`, on that rank and None on others. Every rank
        calls each function, in one order."""
        written: Written = []
        for group in self.groups:
            own_size = -(-group.flat.numel() // self.mesh.dp.size)
            for (name, part), (parameter, start, _) in product(group.state.items(), group.starts()):
                if not parameter.is_copy:
                    # By first element, which spreads the bytes over the data-parallel ranks and
                    # makes the writer the owner of the start.
                    writer = start // own_size
                    whole = partial(self._whole, group, part, parameter, start, writer)
                    written.append((f"{name}.{parameter.name}", parameter, writer, whole))
        return written

    def _whole(
        self, group: FlatGroup, part: Tensor, parameter: ShardedParameter, start: int, writer: int
    ) -> Tensor | None:
        """Return one state tensor of a parameter, such as a moment, in the shape of
        `parameter.local`, on the data-parallel rank `writer`. `part` is this owner's part of the
        group's flat tensor of that state, in which the parameter begins at element `start`. Other
        owners send the writer their elements of `part`; of several owners the writer must be the
        one that has the element `start`. Every rank but the writer returns None. Every owner calls
        it."""
        owners = group.owners
        end = start + parameter.local.numel()
        shape = parameter.local.shape
        own = group.piece(part, start, end)
        if self.mesh.dp.rank != writer:
            if len(own) and owners.size > 1:
                owners.start_send(own, writer).wait()
            return None
        if len(own) < end - start:
            own = torch.cat([own, own.new_empty(end - start - len(own))])
            # A long tensor lies on several owners in a row, and the writer is the first of them.
            for owner, cut in enumerate(range(group.own.stop, end, len(part)), writer + 1):
                owners.start_receive(own[cut - start : cut - start + len(part)], owner).wait()
        return own.view(shape)

    def restore(
        self,
        steps: int,
        fill: Callable[[list[tuple[ShardedParameter, str, int, Tensor]]], None],
        names: Sequence[str] = ("exp_avg", "exp_avg_sq", "master"),
    ) -> None:
        """Load the state tensors with these names, by default both moments and the master weights,
        in place, through the function `fill`, and set the number of steps. The model's 16-bit
        weights stay as they are.

        `fill` is called for each group and each name that the group has. It gets a list of
        (parameter, name, first, tensor) and fills each tensor, which may be empty, with this
        owner's elements of that parameter's state, from element `first` of the parameter on.
        """
        self.steps = steps
        for group in self.groups:
            for name in names:
                if (part := group.state.get(name)) is not None:
                    parts = zip(group.starts(), group.pieces(part), strict=True)
                    fill(
                        [
                            (parameter, name, max(group.own.start - start, 0), own)
                            for (parameter, start, _), own in parts
                        ]
                    )
