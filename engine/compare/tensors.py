"""Tensors that a training step computes: the parts that ranks hold, the whole, their order, and how far two are apart.

Imports no torch. Whole activations are [s, B, h] with B the sequences of the global batch; weights are as this engine
has them whole. A part says where in the whole it begins.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.compare.tolerance import tensor_tolerance
from lineage.errors import IntegrityFailure

Array = NDArray[np.floating[Any]]
Key = tuple[int, str]
"""Iteration, from 0, and name."""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a part of a tensor begins and ends."""
OUTPUT, OUTPUT_GRADIENT = "output of ", "gradient of output of "
PHASES = (OUTPUT, "loss", "mean loss", OUTPUT_GRADIENT, "gradient of ", "gradient norm", "learning rate",
          "exp_avg of ", "exp_avg_sq of ", "updated ")  # fmt: skip
"""How names begin, in the order of an iteration."""


class Piece(NamedTuple):
    """Part of a tensor as one rank computed it."""

    iteration: int
    tensor: str
    start: tuple[int, ...]
    """Where the part begins in the whole tensor."""
    value: Array

    @property
    def end(self) -> tuple[int, ...]:
        """Where it ends."""
        return tuple(a + n for a, n in zip(self.start, self.value.shape, strict=True))


def computation_order(seen: Iterable[str]) -> list[str]:
    """Names of an iteration's tensors as they come to be: forward pass, loss, gradients backward, update.

    `seen` are the names, those of the forward pass and those of the updated weights each in their order.
    """
    names = list(dict.fromkeys(seen))
    outputs = [name.removeprefix(OUTPUT) for name in names if name.startswith(OUTPUT)]
    weights = [name.removeprefix("updated ") for name in names if name.startswith("updated ")]
    place = {OUTPUT + name: number for number, name in enumerate(outputs)}
    place |= {OUTPUT_GRADIENT + name: -number for number, name in enumerate(outputs)}
    for number, name in enumerate(weights):
        place[f"gradient of {name}"] = -number
        place |= {phase + name: number for phase in PHASES[-3:]}
    return sorted(names, key=lambda name: (_phase(name), place.get(name, 0)))


def _phase(name: str) -> int:
    prefixes = sorted(PHASES, key=len, reverse=True)
    return PHASES.index(next(prefix for prefix in prefixes if name.startswith(prefix)))


def assemble(pieces: Iterable[Piece]) -> dict[Key, Array]:
    """Whole tensors by (iteration, name). Of a part that several ranks hold the last is taken.

    Raises IntegrityFailure where parts of a tensor overlap or leave a hole.
    """
    parts: dict[Key, dict[Box, Piece]] = {}
    for piece in pieces:
        parts.setdefault((piece.iteration, piece.tensor), {})[piece.start, piece.end] = piece
    whole = {}
    for key, boxes in parts.items():
        check_cover(f"{key[1]} in iteration {key[0] + 1}", list(boxes))
        shape = np.max([end for _, end in boxes], axis=0).astype(int)
        whole[key] = np.empty(shape, next(iter(boxes.values())).value.dtype)
        for (start, end), piece in boxes.items():
            whole[key][tuple(map(slice, start, end))] = piece.value
    return whole


def check_cover(what: str, boxes: Sequence[Box], whole: tuple[int, ...] | None = None) -> None:
    """Raise IntegrityFailure unless the boxes cover a tensor of shape `whole`, or the smallest that has them, once."""
    if not boxes:
        raise IntegrityFailure(f"{what} has no shards")
    if len({len(side) for box in boxes for side in box} | {len(whole or boxes[0][0])}) > 1:
        raise IntegrityFailure(f"the shards of {what} have different numbers of dims")
    try:
        starts, ends = (np.array([box[side] for box in boxes], np.int64) for side in (0, 1))
        shape = ends.max(0) if whole is None else np.array(whole, np.int64)
    except OverflowError as error:
        raise IntegrityFailure(f"a shard of {what} lies outside every tensor") from error
    if (starts < 0).any() or (ends < starts).any() or (ends > shape).any():
        raise IntegrityFailure(f"a shard of {what} lies outside it")
    for number in range(1, len(boxes)):
        common = (starts[:number] < ends[number]) & (starts[number] < ends[:number])
        if (others := common.all(-1)).any():
            raise IntegrityFailure(
                f"shards of {what} overlap: {_text(boxes[others.argmax()])} and {_text(boxes[number])}"
            )
    held, size = int((ends - starts).prod(1).sum()), math.prod(shape.tolist())
    if held != size:
        raise IntegrityFailure(f"shards of {what} hold {held} of its {size} elements: some are missing")


def _text(box: Box) -> str:
    return f"{list(box[0])} to {list(box[1])}"


class Difference(NamedTuple):
    """How far a tensor of one iteration is from the reference's."""

    largest: float
    """Infinite where a value is no number or the tensor is missing."""
    iteration: int
    tensor: str
    where: str
    elements: int
    """Elements that were compared."""
    tolerance: float

    @property
    def is_within(self) -> bool:
        """Whether it keeps to the tolerance."""
        return self.largest <= self.tolerance

    def sentence(self, reference: str, of: str = "iteration") -> str:
        """What differs from the named reference, by how much and where."""
        number = self.iteration + 1
        return f"{self.tensor} in {of} {number} differs from {reference} by {self.largest:.1e} {self.where}"


def compare(piece: Piece, whole: Array, rank: str, tolerance: float) -> Difference:
    """The largest difference of a piece from the reference's tensor; `rank` names who computed it."""
    expected = whole[tuple(map(slice, piece.start, piece.end))] if len(piece.start) == whole.ndim else np.empty(0)
    if expected.shape != piece.value.shape:
        where = f"on {rank}: it lies at {list(piece.start)} to {list(piece.end)} of {list(whole.shape)}"
        return Difference(np.inf, piece.iteration, piece.tensor, where, 0, tolerance)
    distance = np.abs(piece.value.astype(np.float64) - expected)
    distance = np.where(np.isnan(distance), np.inf, distance)
    place = np.unravel_index(int(distance.argmax()), distance.shape)
    index = [int(a + n) for a, n in zip(piece.start, place, strict=True)]
    where = f"at {index} on {rank}" if index else f"on {rank}"
    return Difference(float(distance[place]), piece.iteration, piece.tensor, where, piece.value.size, tolerance)


def merge(differences: Iterable[Difference], reference: Mapping[Key, Array]) -> list[Difference]:
    """One difference per tensor of the reference, the largest; infinite if parts of it were never compared."""
    merged_parts: dict[Key, list[Difference]] = {key: [] for key in reference}
    for difference in differences:
        merged_parts[difference.iteration, difference.tensor].append(difference)
    merged = []
    for (iteration, tensor), parts in merged_parts.items():
        elements = sum(part.elements for part in parts)
        if not any(part.largest == np.inf for part in parts) and elements < reference[iteration, tensor].size:
            where = f"as ranks computed only {elements} of its {reference[iteration, tensor].size} elements"
            merged.append(Difference(np.inf, iteration, tensor, where, elements, 0.0))
        else:
            merged.append(max(parts)._replace(elements=elements))
    return merged


def first_difference(differences: Iterable[Difference], order: Sequence[str]) -> Difference | None:
    """The first tensor beyond its tolerance in order of computation."""
    place = {tensor: number for number, tensor in enumerate(order)}
    beyond = [difference for difference in differences if not difference.is_within]
    return min(beyond, key=lambda difference: (difference.iteration, place[difference.tensor]), default=None)


def compare_all(
    whole: Mapping[Key, Array], moved: Sequence[Mapping[Key, Array]], ranks: Mapping[str, Sequence[Piece]],
    precision: str,
) -> tuple[Difference | None, list[Difference]]:  # fmt: skip
    """Pieces of each rank beside the reference's whole tensors, whose further runs `moved` give the tolerances.

    The first difference beyond its tolerance, and one for each tensor that both have, in order of computation.
    """
    order = computation_order(tensor for _, tensor in whole)
    layers = _count_layers(order)
    keys = {key for pieces in ranks.values() for piece in pieces if (key := (piece.iteration, piece.tensor)) in whole}
    allowed = {
        key: tensor_tolerance(key[1], whole[key], [draw[key] for draw in moved], layers, precision) for key in keys
    }
    differences = [
        compare(piece, whole[key], rank, allowed[key])
        for rank, pieces in ranks.items() for piece in pieces if (key := (piece.iteration, piece.tensor)) in keys
    ]  # fmt: skip
    place = {tensor: number for number, tensor in enumerate(order)}
    rows = merge(differences, {key: whole[key] for key in keys})
    rows.sort(key=lambda row: (row.iteration, place[row.tensor]))
    return first_difference(rows, order), rows


def _count_layers(names: Iterable[str]) -> int:
    """Of the network that has tensors of these names."""
    return 1 + max((int(match[1]) for name in names if (match := re.search(r"\blayers\.(\d+)", name))), default=-1)
