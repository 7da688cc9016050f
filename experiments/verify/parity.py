"""Whether a layout computes what the serial run computes: which layouts there are, and how tensors are compared.

Imports no torch. Shapes: activations are [s, B, h] with B the sequences of the global batch; every tensor is compared
as the whole model has it, piece by piece as the ranks hold it.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.config import ParallelConfig, RunConfig
from engine.model.stages import split_layers
from engine.parallel.layout import layout_of
from engine.pipeline.schedule import ScheduleName, compute_orders
from lineage.config import parse_config
from lineage.errors import BadInput, UserError

TOLERANCE = 1e-10
"""Largest absolute difference from the serial run, in float64, of any element of any tensor."""

EXAMPLE = "tp2-pp2-dp2-chunks2-sp-recompute"
Array = NDArray[np.float64]


class LayoutDiffers(UserError):
    """A layout does not compute what the serial run computes: exit code 3."""

    exit_code = 3


@dataclass(frozen=True)
class ParityLayout:
    """A way to divide the model, by a name such as `tp2-pp2-dp2-chunks2-sp-recompute`."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    schedule: ScheduleName = "1f1b"
    chunks: int = 1
    sequence_parallel: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    shard_optimizer: bool = False

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tp * self.pp * self.dp

    @property
    def name(self) -> str:
        """The parts that are not as in the serial run."""
        axes = [f"{axis}{size}" for axis, size in (("tp", self.tp), ("pp", self.pp), ("dp", self.dp)) if size > 1]
        order = f"chunks{self.chunks}" if self.chunks > 1 else "" if self.schedule == "1f1b" else self.schedule
        recompute = {"none": "", "selective": "selective", "full": "recompute"}[self.recompute]
        parts = [*axes, order, "sp" * self.sequence_parallel, "zero1" * self.shard_optimizer, recompute]
        return "-".join(part for part in parts if part) or "serial"

    def configure(self, config: RunConfig) -> RunConfig:
        """The run on this layout; what the layout does not decide stays. Raises BadInput if it contradicts itself."""
        values = config.parallel.model_dump() | {
            "tp": self.tp, "pp": self.pp, "chunks": self.chunks, "schedule": self.schedule,
            "sequence_parallel": self.sequence_parallel, "recompute": self.recompute,
            "shard_optimizer": self.shard_optimizer,
        }  # fmt: skip
        return config.model_copy(update={"parallel": parse_config(values, ParallelConfig, self.name)})


SERIAL = ParityLayout()


def parse_layout(text: str) -> ParityLayout:
    """The layout of a name. Raises BadInput for a part that is unknown or comes twice."""
    values: dict[str, Any] = {}
    for part in text.split("-"):
        if sized := re.fullmatch(r"(tp|pp|dp|chunks)([1-9]\d{0,5})", part):
            given: dict[str, Any] = {sized[1]: int(sized[2])}
        elif part in ("gpipe", "1f1b", "interleaved"):
            given = {"schedule": part}
        elif part in ("recompute", "selective"):
            given = {"recompute": "full" if part == "recompute" else part}
        elif part == "sp":
            given = {"sequence_parallel": True}
        elif part == "zero1":
            given = {"shard_optimizer": True}
        else:
            raise BadInput(f"{text!r} is not a layout: {part!r} is no part of a name such as {EXAMPLE}")
        if given.keys() & values.keys():
            raise BadInput(f"{text!r} is not a layout: it says {part!r} and another of its kind")
        values |= given
    if values.get("chunks", 1) > 1:
        values.setdefault("schedule", "interleaved")
    return ParityLayout(**values)


def all_layouts(ranks: int) -> Iterator[ParityLayout]:
    """Every tp × pp × dp of at most `ranks`, each with every schedule and all else that can be on or off.

    The interleaved schedule has two chunks per rank; `selective` recomputation and more chunks are to be had by name.
    The serial run itself is left out.
    """
    sizes = range(1, ranks + 1)
    orders: tuple[tuple[ScheduleName, int], ...] = (("1f1b", 1), ("gpipe", 1), ("interleaved", 2))
    for tp, pp, dp in itertools.product(sizes, sizes, sizes):
        if tp * pp * dp > ranks:
            continue
        divided = (False, True) if tp > 1 else (False,)
        sharded = (False, True) if dp > 1 else (False,)
        for (schedule, chunks), sequence_parallel, zero, recompute in itertools.product(
            orders if pp > 1 else orders[:1], divided, sharded, (False, True)
        ):
            layout = ParityLayout(
                tp, pp, dp, schedule, chunks, sequence_parallel, "full" if recompute else "none", zero
            )  # fmt: skip
            if layout != SERIAL:
                yield layout


def misfit(layout: ParityLayout, config: RunConfig) -> str | None:
    """Why the layout cannot run the configuration, as a sentence; None if it can."""
    try:
        run = layout.configure(config)
        layout_of(run, layout.world_size)
        split_layers(run.model.num_layers, layout.pp, layout.chunks)
        microbatches = run.train.global_batch_size // (run.train.microbatch_size * layout.dp)
        compute_orders(layout.schedule, layout.pp, layout.chunks, microbatches)
    except BadInput as error:
        return str(error)
    return None


def choose_layouts(
    names: str, ranks: int, config: RunConfig
) -> tuple[list[ParityLayout], dict[str, list[ParityLayout]]]:
    """The layouts of `--layouts`, fewest ranks first, and by their reason those of `all` that do not fit.

    Raises BadInput if a layout that was named does not fit or is the serial run.
    """
    if names == "all":
        fitting: list[ParityLayout] = []
        others: dict[str, list[ParityLayout]] = {}
        for layout in all_layouts(ranks):
            reason = misfit(layout, config)
            (others.setdefault(reason, []) if reason else fitting).append(layout)
        return sorted(fitting, key=lambda layout: layout.world_size), others
    chosen = list(dict.fromkeys(parse_layout(name.strip()) for name in names.split(",")))
    for layout in chosen:
        if layout == SERIAL:
            raise BadInput("tp1 is the serial run itself; name a layout to compare with it")
        if layout.world_size > ranks:
            raise BadInput(f"{layout.name} needs {layout.world_size} ranks and --ranks allows {ranks}")
        if reason := misfit(layout, config):
            raise BadInput(f"{layout.name} does not fit: {reason}")
    return chosen, {}


class Piece(NamedTuple):
    """Part of a tensor as one rank computed it."""

    iteration: int
    tensor: str
    start: tuple[int, ...]
    """Where the part begins in the whole tensor."""
    value: Array


def computation_order(num_layers: int, parameters: Sequence[str]) -> list[str]:
    """Names of an iteration's tensors as they come to be: forward pass, loss, gradients backward, update."""
    return [
        "output of embedding",
        *[f"output of layers.{layer}" for layer in range(num_layers)],
        "output of final_layernorm",
        "loss",
        "mean loss",
        *[f"gradient of {name}" for name in reversed(parameters)],
        "gradient norm",
        *[f"updated {name}" for name in parameters],
    ]


def assemble(pieces: Iterable[Piece]) -> dict[tuple[int, str], Array]:
    """Whole tensors by (iteration, name) from the pieces of a serial run, which cover each tensor once."""
    assembled: dict[tuple[int, str], list[Piece]] = {}
    for piece in pieces:
        assembled.setdefault((piece.iteration, piece.tensor), []).append(piece)
    whole = {}
    for key, parts in assembled.items():
        ends = [[a + n for a, n in zip(part.start, part.value.shape, strict=True)] for part in parts]
        whole[key] = np.full(np.max(ends, axis=0) if ends[0] else (), np.nan)
        for part, end in zip(parts, ends, strict=True):
            whole[key][tuple(map(slice, part.start, end))] = part.value
    return whole


class Difference(NamedTuple):
    """How far a tensor of one iteration is from the serial run's."""

    largest: float
    """Infinite where a value is no number or the tensor is missing."""
    iteration: int
    tensor: str
    where: str
    elements: int
    """Elements that were compared."""

    @property
    def is_within(self) -> bool:
        """Whether it keeps to the tolerance."""
        return self.largest <= TOLERANCE

    def sentence(self) -> str:
        """What differs, by how much and where."""
        return (
            f"{self.tensor} in iteration {self.iteration + 1} differs from the serial run by {self.largest:.1e} "
            f"{self.where}"
        )


def compare(piece: Piece, whole: Array, rank: str) -> Difference:
    """The largest difference of a piece from the serial run's tensor; `rank` names who computed it."""
    end = tuple(a + n for a, n in zip(piece.start, piece.value.shape, strict=True))
    expected = whole[tuple(map(slice, piece.start, end))]
    if expected.shape != piece.value.shape:
        where = f"on {rank}: it lies at {list(piece.start)} to {list(end)} of {list(whole.shape)}"
        return Difference(np.inf, piece.iteration, piece.tensor, where, 0)
    distance = np.abs(piece.value - expected)
    distance = np.where(np.isnan(distance), np.inf, distance)
    place = np.unravel_index(int(distance.argmax()), distance.shape)
    index = [int(a + n) for a, n in zip(piece.start, place, strict=True)]
    where = f"at {index} on {rank}" if index else f"on {rank}"
    return Difference(float(distance[place]), piece.iteration, piece.tensor, where, piece.value.size)


def merge(differences: Iterable[Difference], reference: dict[tuple[int, str], Array]) -> list[Difference]:
    """One difference per tensor of the reference, the largest; infinite if parts of it were never compared."""
    merged_parts: dict[tuple[int, str], list[Difference]] = {key: [] for key in reference}
    for difference in differences:
        merged_parts[difference.iteration, difference.tensor].append(difference)
    merged = []
    for (iteration, tensor), parts in merged_parts.items():
        elements = sum(part.elements for part in parts)
        if not any(part.largest == np.inf for part in parts) and elements < reference[iteration, tensor].size:
            where = f"as ranks computed only {elements} of its {reference[iteration, tensor].size} elements"
            merged.append(Difference(np.inf, iteration, tensor, where, elements))
        else:
            merged.append(max(parts)._replace(elements=elements))
    return merged


def first_difference(differences: Iterable[Difference], order: Sequence[str]) -> Difference | None:
    """The first tensor beyond the tolerance in order of computation."""
    place = {tensor: number for number, tensor in enumerate(order)}
    beyond = [difference for difference in differences if not difference.is_within]
    return min(beyond, key=lambda difference: (difference.iteration, place[difference.tensor]), default=None)
