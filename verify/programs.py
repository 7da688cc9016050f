"""A torch model, or a program of the user's, on one rank of a layout, as an engine in float64."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from mlm_repro.engine.compare.recorder import Recorder
from mlm_repro.engine.compare.tensors import Array
from mlm_repro.lineage.errors import BadInput
from mlm_repro.verify.engines import Engine, Named, Shard, Work
from mlm_repro.verify.parity import ParityLayout

Loss = Callable[[nn.Module, Any], Tensor]
"""Function (model, rows of the batch) → mean loss of a microbatch."""


EXACT = 1e-9
"""Largest allowed difference of an element in float64, in multiples of the largest element of the
serial tensor or, if that is larger, of any serial gradient."""


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss that a model gives for a batch: the attribute `loss` of its output, which
    must not be None, or else the output itself, a tensor. If the loss has dims, return its mean
    square. A batch that is a mapping gives the model's keyword arguments."""
    output = model(**batch) if isinstance(batch, Mapping) else model(batch)
    output = getattr(output, "loss", output)
    return output if output.dim() == 0 else output.square().mean()


class Program(Engine):
    """Engine of a torch model; each rank of a layout makes one, of its part of the model. Besides
    the model, all arguments are optional. Without the function `gradient`, the loss of every
    microbatch goes backward, by the attributes `microbatches` and `loss`, which HeldTraining sets.
    Without `step`, `clip` is called, if it is given, and `optimizer`, by default an AdamW, updates.
    Unless both `save` and `restore` are given, checkpoints are not compared."""

    microbatches: Sequence[Any] = ()
    loss: Loss
    shares: dict[str, list[Array]]
    drops_at_zero = False

    def __init__(
        self,
        model: nn.Module,
        gradient: Callable[[], float] | None = None,
        step: Callable[[], float] | None = None,
        starts: Mapping[str, tuple[int, ...]] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        save: Callable[[Path], None] | None = None,
        restore: Callable[[Path], None] | None = None,
        clip: Callable[[], Any] | None = None,
        named: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        """Make the engine of `model`, this rank's part of the whole model. All other arguments are
        optional.

        `gradient` runs the same batch at every layout, forward and backward, reduces the gradients
        and returns the mean loss; by default the loss of every microbatch of this rank goes
        backward, and the model itself must reduce the gradients. `step` clips, updates and returns
        the norm of the whole gradient; by default `clip` clips and returns it, and the optimizer
        updates. If neither `step` nor `clip` is given, the norm is not compared, and planted
        gradients are not counted. `named` are the parameters by their names in the whole model,
        where this rank's model has others. `starts` has, by name, the first indices of this rank's
        parts of parameters in the whole; a DTensor knows its own, other parameters are whole.
        Moments of the `optimizer` are compared: by default of an AdamW that is made here, and none
        if `step` is given without an optimizer. `save` writes a checkpoint into a new directory,
        `restore` loads one of any layout; every rank calls them. Unless both are given, checkpoints
        are not compared.
        """
        self.module = model
        self.gradient = gradient
        self.starts = starts or {}
        self.own = dict(named or model.named_parameters())
        self.optimizer = optimizer
        if optimizer is None and step is None:
            self.optimizer = torch.optim.AdamW(
                self.own.values(), lr=1e-2, eps=1e-3, weight_decay=0.1, foreach=False
            )
        self.clip = clip
        self.clip_and_update = step
        self.shares = {}
        self.counts_norm = bool(step or clip)
        if save and restore:
            vars(self).update(save=save, restore=restore)

    def parameters(self) -> Named:
        return ((name, parameter.detach()) for name, parameter in self.own.items())

    def shards(self, named: Mapping[str, Tensor]) -> list[Shard]:
        return [
            Shard(name, name, *part_of(value, self.starts.get(name)))
            for name, value in named.items()
        ]

    @torch.no_grad()
    def assign(self, value_of: Callable[[Shard], Tensor]) -> None:
        for shard in self.shards(dict(self.parameters())):
            own = self.own[shard.parameter]
            value = value_of(shard)
            local = _local(own)
            if value.shape == own.shape != local.shape:  # divided twice along one dim
                value = _divided(value, own)
            local.copy_(value)

    def backward(self, iteration: int, recorder: Recorder | None) -> float:
        if self.gradient:
            return float(self.gradient())
        self.module.zero_grad()
        total = torch.zeros(())
        keeps = bool(recorder) and not dist.is_initialized() and not self.shares
        for microbatch in self.microbatches:
            loss = whole_of(self.loss(self.module, microbatch)) / len(self.microbatches)
            loss.backward()
            total += loss.detach()
            for name, value in self.gradients() if keeps else ():
                self.shares.setdefault(name, []).append(value.numpy().copy())
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= dist.get_world_size()
        return total.item()

    def gradients(self) -> Named:
        return (
            (name, parameter.grad)
            for name, parameter in self.own.items()
            if parameter.grad is not None
        )

    def gradient_of(self, parameter: str) -> Tensor:
        own = self.own[parameter]
        if own.grad is None or "Partial" in str(getattr(own.grad, "placements", "")):
            own.grad = torch.zeros_like(own)
        return _local(own.grad)

    def update(self, iteration: int) -> tuple[float, float]:
        if self.clip_and_update:
            return float(self.clip_and_update()), 0.0
        norm = float(whole_of(torch.as_tensor(self.clip()))) if self.clip else 0.0
        assert self.optimizer
        self.optimizer.step()
        return norm, 0.0

    def state(self) -> Iterator[tuple[str, str, Tensor]]:
        states: Any = self.optimizer.state if self.optimizer else {}
        for name, parameter in self.own.items():
            for what in ("exp_avg", "exp_avg_sq"):
                if what in states.get(parameter, {}):
                    yield name, what, states[parameter][what]


class InDouble(TorchFunctionMode):
    """Function mode of torch that computes in float64 where a program asks for fp32, as norms do,
    so that nothing rounds: `Tensor.float` and an argument `torch.float32` give float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide: list[Any] = [torch.float64 if each is torch.float32 else each for each in args]
        named: dict[str, Any] = {
            name: torch.float64 if each is torch.float32 else each
            for name, each in (kwargs or {}).items()
        }
        call: Any = Tensor.double if func is Tensor.float else func
        return call(*wide, **named)


@dataclass(frozen=True)
class HeldTraining:
    """A training of a model, which is called like a function, with a Work and a layout, on each
    rank of the layout, and returns the Program of that rank. Its field `build` makes the model for
    a layout; `batch` is the whole batch, which is divided into `microbatches` on every rank, and
    `loss` the function of the loss of a model and a microbatch. `tolerance` states how exactly
    layouts are to agree, `in_double` whether operations in fp32 are done in float64."""

    build: Callable[[ParityLayout], Any]
    """Function that is given a layout and returns a model, a model and its optimizer, or a
    Program."""
    batch: Any = None
    """Batch of tensors whose first dim is the row; None for a program with its own `gradient`."""
    loss: Loss = own_loss
    microbatches: int = 1
    """Number of microbatches on every rank."""
    tolerance: float = EXACT
    """Largest allowed difference of an element, in the multiples that `EXACT` describes."""
    in_double: bool = True
    """True if operations that the program does in fp32 are done in float64."""

    def __call__(self, work: Work, layout: ParityLayout) -> Program:
        """Build the program for the training `work` on this rank of `layout` and return it, a
        Program that has `work` as its attribute. Unless the Program has a `gradient` of its own,
        its attributes `loss` and `microbatches`, a list with this rank's rows of the batch, are set
        too. Every rank calls it. Raises BadInput if the rows of the batch cannot be divided evenly,
        or for a layout that sets the size of microbatches.

        For the rest of this process torch's default type is float64 and warnings are silent. If
        `in_double` is set, fp32 operations are also done in float64 (`InDouble`).
        """
        if layout.mb:
            raise BadInput(
                "mb, the size of microbatches in a layout's name, is for `mlm-verify layouts"
                " megatron-core` alone: leave it out"
            )
        # For the rest of the process, which is one rank.
        torch.set_default_dtype(torch.float64)
        warnings.filterwarnings("ignore")
        logging.disable(logging.WARNING)
        if self.in_double:
            InDouble().__enter__()
        built = self.build(layout)
        parts = built if isinstance(built, tuple) else (built,)
        program = (
            built
            if isinstance(built, Program)
            else Program(parts[0], optimizer=parts[1] if parts[1:] else None)
        )
        program.work = work
        data = layout.dp * layout.fsdp
        if program.gradient is None:
            rank = (dist.get_rank() if dist.is_initialized() else 0) // layout.tp % data
            places = range(rank * self.microbatches, (rank + 1) * self.microbatches)
            of = data * self.microbatches
            program.microbatches = [
                tree_map(partial(_rows, place, of), self.batch) for place in places
            ]
            vars(program)["loss"] = self.loss
        return program


def _rows(place: int, of: int, tensor: Any) -> Any:
    if not isinstance(tensor, Tensor):
        return tensor
    if len(tensor) % of:
        raise BadInput(
            f"a batch of {len(tensor)} rows cannot be divided into the {of} microbatches of all"
            " data-parallel ranks: give a batch with a multiple of as many rows, or fewer"
            " microbatches"
        )
    return tensor[place * len(tensor) // of : (place + 1) * len(tensor) // of]


def _local(value: Any) -> Tensor:
    """Return the part of a DTensor that is on this rank; any other tensor as it is."""
    return value.to_local() if _is_dtensor(value) else value


def _is_dtensor(value: Any) -> bool:
    return hasattr(value, "placements")


def whole_of(value: Tensor) -> Tensor:
    """Return the whole tensor that the parts of a DTensor make, by a collective; any other tensor
    as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def part_of(value: Tensor, given: tuple[int, ...] | None) -> tuple[tuple[int, ...], Tensor]:
    """Return the first indices in the whole, and the value, of this rank's part of a tensor. For a
    DTensor the indices follow from its placements; for another tensor they are `given`, or zeros
    without `given`.

    A DTensor that is a partial sum, or that FSDP2 divides along the dim that tensor parallelism has
    divided, is gathered by a collective: its part is the whole then.
    """
    if not _is_dtensor(value):
        return given or (0,) * value.dim(), value
    placed: Any = value
    kinds = {type(placement).__name__ for placement in placed.placements}
    if kinds - {"Shard", "Replicate"}:
        return (0,) * value.dim(), placed.full_tensor()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as place

    start = place(placed.shape, placed.device_mesh, placed.placements)[1]
    return tuple(start), placed.to_local()


def _divided(whole: Tensor, like: Any) -> Tensor:
    """Return this rank's part of a whole tensor, with the shape of the local part of the DTensor
    `like` and divided as that is, even if twice along one dim. A collective."""
    from torch.distributed.tensor import DTensor

    # Each element is numbered, and the numbers are gathered: torch alone knows how it divides
    # twice.
    own = like.to_local()
    first = dist.get_rank() * 2.0**32
    numbers = first + torch.arange(own.numel(), dtype=torch.float64).view(own.shape)
    of = DTensor.from_local(
        numbers, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
    numbers = (of.full_tensor().flatten() - first).long()
    is_own = (numbers >= 0) & (numbers < own.numel())
    part = torch.empty(own.numel(), dtype=whole.dtype)
    part[numbers[is_own]] = whole.flatten()[is_own]
    return part.view(own.shape)
