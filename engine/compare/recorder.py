"""Records the tensors of a training step of any torch module, by hooks, under this engine's names
and in its layout.

A name map translates names and layouts of another engine; `names/` has the maps of known engines.
Shapes: b microbatch, s sequence, h hidden, n heads, d head dim.
"""

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from mlm_repro.engine.compare.tensors import OUTPUT, OUTPUT_GRADIENT, TensorPart
from mlm_repro.engine.optim.flat import FlatOptimizer
from mlm_repro.engine.parallel.sharding import ShardedParameter
from mlm_repro.lineage.config import Config, load_config
from mlm_repro.lineage.errors import BadInput

SHIPPED = Path(__file__).parent / "names"
WRAPPERS = re.compile(r"^((module|_orig_mod|model)\.)+")


class NameMap(Config):
    """Translation of another engine's module and parameter names, and of its layouts, to ours.

    In a pattern, `*` matches one part between dots and `**` one or more parts.
    """

    outputs: dict[str, str]
    """Patterns of the engine's names of modules → our names. A module's output is a tensor [s, b,
    ...] or a tuple that begins with one."""
    parameters: dict[str, str]
    """Patterns of the engine's names of parameters → our names."""
    batch_first: bool = False
    """True if the engine's activations are [b, s, ...]."""
    transposed: tuple[str, ...] = ()
    """Suffixes of our names of weights that are [in, out] in that engine."""
    grouped: tuple[str, ...] = ()
    """Suffixes of our names whose rows are [3, n, d] in that engine and [n, 3, d] in ours."""
    columns: tuple[str, ...] = ()
    """Suffixes of our names of outputs whose last dim is divided over tensor-parallel ranks."""
    divided: dict[str, int] = Field(default_factory=dict)
    """Suffixes of our names of parameters → the dim that is divided over tensor-parallel ranks."""

    def ours(self, name: str, table: dict[str, str], first_layer: int) -> str | None:
        """Return our name for `name`, the engine's name of a module or parameter, or None if the
        dict `table` of patterns lacks it: the map's `outputs` for a module, `parameters` for a
        parameter. Wrappers' names in front, such as `module.`, are left out first. The engine's
        layer 0 is our layer number `first_layer`."""
        named = _renamed(WRAPPERS.sub("", name), table.items())
        return named and re.sub(
            r"^layers\.(\d{1,6})", lambda match: f"layers.{int(match[1]) + first_layer}", named
        )

    def theirs(self, name: str) -> str | None:
        """Return the other engine's name for one of our parameters; the first if the map has
        several, None if it has none. Layers keep their numbers."""
        return _renamed(name, ((ours, theirs) for theirs, ours in self.parameters.items()))

    def in_our_order(self, ours: str, value: Tensor, heads: int) -> Tensor:
        """Return `value`, another engine's parameter whose name here is `ours`, in our layout: [in,
        out] becomes [out, in], and rows [3, n, d] become [n, 3, d], if the map says so for this
        name. `heads` is n, the number of attention heads in `value`."""
        value = value.T if ours.endswith(self.transposed) else value
        if ours.endswith(self.grouped):
            value = value.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
        return value

    def in_their_order(self, ours: str, value: Tensor, heads: int) -> Tensor:
        """Return `value`, our parameter named `ours`, in the other engine's layout, the inverse of
        `in_our_order`: rows [n, 3, d] become [3, n, d], and [out, in] becomes [in, out], if the map
        says so for this name. `heads` is n, the number of attention heads in `value`."""
        if ours.endswith(self.grouped):
            value = value.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        return value.T if ours.endswith(self.transposed) else value


def _renamed(name: str, patterns: Iterable[tuple[str, str]]) -> str | None:
    """Return the name translated by the first pair (pattern, translation) of `patterns` whose
    pattern matches the whole of it, or None. In a pattern, `*` matches one part between dots and
    `**` one or more parts; each `*` or `**` of the translation becomes the text that the pattern's
    matched, in the same order."""
    for pattern, other in patterns:
        expression = re.escape(pattern).replace(r"\*\*", "(.+)").replace(r"\*", "([^.]+)")
        if match := re.fullmatch(expression, name):
            return re.sub(r"\*+", "{}", other).format(*match.groups())
    return None


def read_names(name: str) -> NameMap:
    """Return the NameMap of a known engine, by its name, or of a TOML file, by its path. Raises
    BadInput if there is no such map, or if the file is not a valid one."""
    path = SHIPPED / f"{name}.toml"
    if not path.is_file() and not (path := Path(name)).is_file():
        known = ", ".join(sorted(path.stem for path in SHIPPED.glob("*.toml")))
        raise BadInput(
            f"there is no name map {name}, which translates an engine's names of tensors: give a"
            f" TOML file or one of {known}"
        )
    return load_config(path, NameMap)


@dataclass(frozen=True)
class RankPlace:
    """Place of a rank whose tensors are recorded: the number `tp` of tensor-parallel ranks and the
    rank's index `tp_rank` among them, from 0; whether the sequence is divided over them; and the
    number of the rank's first layer in the whole model, from 0. The defaults are for a rank that
    has the whole model."""

    tp: int = 1
    tp_rank: int = 0
    sequence_parallel: bool = False
    first_layer: int = 0
    """Number in the whole model of this rank's first layer, which its module calls layer 0."""


class Recorder:
    """Recorder of an engine's tensors on one rank in a training step. The caller gives them to its
    methods, or lets `watch` find a module's outputs; each goes to the function `take` as a
    TensorPart, under the iteration number in `iteration`, which the caller sets.

    `names` is the map of the engine's names and layouts to ours, `place` this rank's place in the
    layout, by default the only rank's, and `heads` the number of attention heads on this rank, by
    which the rows that the map calls `grouped` are put into our order.
    """

    def __init__(
        self,
        names: NameMap,
        take: Callable[[TensorPart], None],
        place: RankPlace | None = None,
        heads: int = 1,
    ) -> None:
        self.names = names
        self.take = take
        self.place = place or RankPlace()
        self.heads = heads
        self.iteration = 0

    def show(self, tensor: str, value: Any, start: tuple[int, ...] = ()) -> None:
        """Pass a number, or the part of a tensor that begins at index `start` of the whole tensor,
        to the recorder's function `take`, as a TensorPart named by the argument `tensor`, with a
        copy of the values on the host. Numbers and fp64 tensors are given as fp64, all others as
        fp32. Without `start` the part begins at the first element."""
        array = torch.as_tensor(
            value, dtype=None if isinstance(value, Tensor) else torch.float64
        ).detach()
        array = array if array.dtype == torch.float64 else array.float()
        copied = array.cpu().clone(memory_format=torch.contiguous_format).numpy()
        self.take(TensorPart(self.iteration, tensor, start or (0,) * copied.ndim, copied))

    def watch(
        self, module: nn.Module, starts: Sequence[int], scale: float = 1.0
    ) -> Callable[[], None]:
        """Record outputs of those submodules of `module` that the map's `outputs` name, and the
        gradients times `scale` of those outputs that require one, until the returned function is
        called; gradients of outputs recorded before are recorded even after that.

        The n-th call of a submodule belongs to the microbatch that begins at sequence `starts[n]`
        of the global batch; there must be no call beyond these. Recomputation in the backward pass
        is not recorded.
        """
        hooks = ExitStack()
        for name, child in module.named_modules():
            ours = self.names.ours(name, self.names.outputs, self.place.first_layer)
            if ours is not None:
                hooks.enter_context(
                    child.register_forward_hook(partial(self._record, ours, iter(starts), scale))
                )
        return hooks.close

    def loss(self, value: Tensor, first: int, microbatch_size: int) -> None:
        """Pass a microbatch's mean loss, a tensor of one element, to the recorder's function `take`
        as a TensorPart: the element at index `first` / `microbatch_size` of a whole tensor `loss`,
        [microbatches of the global batch]. `first` is the number of the microbatch's first sequence
        in the global batch, and every microbatch has `microbatch_size` sequences."""
        self.show("loss", value.view(1), (first // microbatch_size,))

    def _record(
        self,
        name: str,
        starts: Iterator[int],
        scale: float,
        module: nn.Module,
        inputs: Any,
        output: Any,
    ) -> None:
        # Within a backward pass the module is recomputed; its output was recorded before.
        if torch._C._current_graph_task_id() != -1:
            return
        tensor = output[0] if isinstance(output, tuple) else output
        first = next(starts)
        self._show_output(OUTPUT + name, tensor, first)
        if tensor.requires_grad:
            tensor.register_hook(
                lambda values: self._show_output(OUTPUT_GRADIENT + name, values * scale, first)
            )

    def _show_output(self, name: str, value: Tensor, first: int) -> None:
        # Transposed to [s, b, ...] before anything else: starts are counted in that order.
        value = value.detach().transpose(0, 1) if self.names.batch_first else value.detach()
        start = [0, first, *[0] * (value.dim() - 2)]
        if name.endswith(self.names.grouped):
            value = value.unflatten(-1, (3, self.heads, -1)).transpose(-3, -2).flatten(-3)
        if name.endswith(self.names.columns):
            start[-1] = self.place.tp_rank * value.size(-1)
        elif self.place.sequence_parallel:
            start[0] = self.place.tp_rank * value.size(0)
        self.show(name, value, tuple(start))

    def ours(self, name: str) -> str | None:
        """Return our name for `name`, the engine's name of a parameter, by the map and with this
        rank's first layer counted in, or None if the map lacks the parameter."""
        return self.names.ours(name, self.names.parameters, self.place.first_layer)

    def parameter(self, kind: str, name: str, value: Tensor) -> None:
        """Bring `value`, a parameter of the engine or a tensor laid out like it, such as its
        gradient, into our layout, and record it as the part that this rank holds of the whole. The
        recorded name is the prefix `kind`, such as "gradient of ", then our name for the engine's
        parameter `name`. Do nothing if the map lacks the parameter."""
        if (ours := self.ours(name)) is not None:
            value = self.names.in_our_order(ours, value.detach(), self.heads)
            self.show(f"{kind}{ours}", value, self.start(ours, value))

    def start(self, ours: str, value: Tensor) -> tuple[int, ...]:
        """Return, as a tuple, the index in the whole parameter at which this rank's part, `value`,
        begins, both in our layout. `ours` is our name for the parameter; the map's `divided` says
        which dim tensor-parallel ranks divide, in equal parts."""
        divided = next((dim for end, dim in self.names.divided.items() if ours.endswith(end)), None)
        return tuple(
            self.place.tp_rank * size if dim == divided else 0
            for dim, size in enumerate(value.shape)
        )


def moved(value: Tensor, name: str, draw: int) -> Tensor:
    """Return a copy of a weight w on its device, perturbed to w(1 + δ), with its shape and number
    format. Each δ is drawn uniformly from ± the unit round-off of this format. The weight's
    name, shape and format and the number of the draw alone decide them."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {draw}".encode()))
    moves = torch.rand(value.shape, generator=generator, dtype=torch.float64).mul_(2).sub_(1)
    factor = 1 + torch.finfo(value.dtype).eps / 2 * moves.to(value.device)
    return (value.double() * factor).to(value.dtype)


def whole_gradients(optimizer: FlatOptimizer) -> Iterator[tuple[ShardedParameter, Tensor]]:
    """Yield (parameter, gradient) for each parameter of this rank: its reduced gradient before
    clipping, as `TrainingStep.gradient` leaves it in the optimizer, gathered from the ranks that
    share the optimizer. It has the parameter's local shape, a part if the parameter is divided over
    other axes, and is fp32 in mixed precision. A rank that shares with no other gets a view, no
    copy. Collective: each of these ranks must iterate to the end."""
    for group in optimizer.groups:
        yield from group.views(group.owners.all_gather(group.own_gradient, dim=0))


def whole_state(optimizer: FlatOptimizer) -> Iterator[tuple[ShardedParameter, str, Tensor]]:
    """Yield (parameter, name, tensor) for each parameter of this rank and each of its states in
    `optimizer`: group by group, first `exp_avg` of all the group's parameters, then `exp_avg_sq`
    and, in mixed precision, `master`. The tensor is gathered from the ranks that share the
    optimizer, and has the parameter's local shape; a rank that shares with no other gets a view, no
    copy. Collective: each of these ranks must iterate to the end."""
    for group in optimizer.groups:
        for name, part in group.state.items():
            for parameter, view in group.views(group.owners.all_gather(part, dim=0)):
                yield parameter, name, view
