"""Tensors of a training step: joined from the parts on each rank, put in order, and compared.
Imports no torch.

Whole activations are [s, B, h], with B the sequences of the global batch. Whole weights have this
engine's layout.

The tolerance for two engines that compute the same is how far rounding takes one of them. The
reference is run again, `DRAWS` times. Before every iteration of such a run each weight w becomes
w(1 + δ), with δ drawn evenly from ± u, the unit round-off of the weights' number format (Monte
Carlo arithmetic: Parker 1997, UCLA CSD-970002). The spread S of a number, or of a tensor's
elements, is the largest distance of these runs from the first. Two engines may then differ by

    T = TAIL · √R · (S + u₃₂ · |x|) + 2u · |x|,    R = 2 · (8L + 4)

R is the number of roundings in a row, from the input to the loss and back, in a network of L
layers: two layer norms, four products and two additions per layer; an embedding, a layer norm, a
product and the loss. The spread has one of these roundings, and independent ones add up as √R
(Higham & Mary 2019, SIAM J. Sci. Comput. 41). TAIL is needed because `DRAWS` runs show the width of
a distribution and not its end. |x| is the largest element, u₃₂ the unit round-off of fp32. The last
term is for the format of x itself: two nearly equal values may be rounded to neighbours. Over
iterations S is the largest so far, because differences grow.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mlm_repro.lineage.errors import IntegrityFailure

Array = NDArray[np.floating[Any]]
Key = tuple[int, str]
"""(number of an iteration, from 0, tensor name)."""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(begin, end) of a part in the whole tensor: an index each, the end exclusive."""
OUTPUT = "output of "
OUTPUT_GRADIENT = "gradient of output of "
PHASES = (
    OUTPUT,
    "loss",
    "mean loss",
    OUTPUT_GRADIENT,
    "gradient of ",
    "gradient norm",
    "learning rate",
    "exp_avg of ",
    "exp_avg_sq of ",
    "updated ",
)
"""Prefixes of tensor names, in the order in which an iteration computes the tensors."""
DRAWS = 4
TAIL = 4.0
UNIT_FP32 = 2.0**-24
FORMULA = "T = 4·√(2(8L + 4))·(S + 2⁻²⁴·|x|) + 2u·|x|"
HELD_IN_BF16 = ("output of ", "gradient of output of ", "updated ")
"""Prefixes of the names of tensors that a bf16 run holds in bf16. All others are in fp32."""


class TensorPart(NamedTuple):
    """Part of a tensor of one iteration, as one rank computed it: number of the iteration, from 0;
    name of the tensor; `start`, the index in the whole tensor at which the part begins, a tuple
    with a number for each dim; and `value`, the part's values, a numpy array in the part's
    shape."""

    iteration: int
    tensor: str
    start: tuple[int, ...]
    """Index in the whole tensor at which the part begins."""
    value: Array

    @property
    def end(self) -> tuple[int, ...]:
        """Index in the whole tensor at which the part ends, exclusive: a tuple with a number for
        each dim."""
        return tuple(a + n for a, n in zip(self.start, self.value.shape, strict=True))


def computation_order(names: Iterable[str]) -> list[str]:
    """Return a list of the names of an iteration's tensors, each once, in the order in which they
    are computed: forward pass, loss, gradients backward, update.

    Every name must begin with one of `PHASES`. Names of outputs and of updated weights must come in
    the order of the forward pass; the order of the updated weights decides the order of the
    weights' moments and, reversed, of their gradients.
    """
    names = list(dict.fromkeys(names))
    outputs = [name.removeprefix(OUTPUT) for name in names if name.startswith(OUTPUT)]
    weights = [name.removeprefix("updated ") for name in names if name.startswith("updated ")]
    order = {OUTPUT + name: number for number, name in enumerate(outputs)}
    order |= {OUTPUT_GRADIENT + name: -number for number, name in enumerate(outputs)}
    for number, name in enumerate(weights):
        order[f"gradient of {name}"] = -number
        order |= {phase + name: number for phase in PHASES[-3:]}
    prefixes = sorted(PHASES, key=len, reverse=True)

    def phase(name: str) -> int:
        return PHASES.index(next(prefix for prefix in prefixes if name.startswith(prefix)))

    return sorted(names, key=lambda name: (phase(name), order.get(name, 0)))


def assemble(parts: Iterable[TensorPart]) -> dict[Key, Array]:
    """Return a dict (iteration from 0, tensor name) → whole tensor as a numpy array. `parts` has
    the TensorParts of all tensors from all ranks, one after the other. If several ranks computed
    the same part, the last one counts. A tensor is taken to end where its parts end.

    Raises IntegrityFailure if the parts of a tensor overlap, leave a hole between them or have
    different numbers of dims; parts that are missing at its end are not noticed.
    """
    by_tensor: dict[Key, dict[Box, Array]] = {}
    for part in parts:
        by_tensor.setdefault((part.iteration, part.tensor), {})[part.start, part.end] = part.value
    whole = {}
    for key, boxes in by_tensor.items():
        check_cover(f"{key[1]} in iteration {key[0] + 1}", list(boxes))
        shape = np.max([end for _, end in boxes], axis=0).astype(int)
        whole[key] = np.empty(shape, next(iter(boxes.values())).dtype)
        for (start, end), value in boxes.items():
            whole[key][tuple(map(slice, start, end))] = value
    return whole


def check_cover(what: str, boxes: Sequence[Box], whole: tuple[int, ...] | None = None) -> None:
    """Raise IntegrityFailure unless the boxes cover a tensor of shape `whole` exactly once: there
    must be at least one, and none may be missing, overlap, lie outside or have another number of
    dims. A box is a pair of index tuples, the begin of a part and its end, exclusive. Without
    `whole` the tensor ends where the boxes end. `what` names the tensor in the message."""
    if not boxes:
        raise IntegrityFailure(
            f"no part of {what} is listed: its checkpoint is damaged, so copy or save it again"
        )
    dims = {len(boxes[0][0] if whole is None else whole), *map(len, chain.from_iterable(boxes))}
    if len(dims) > 1:
        raise IntegrityFailure(
            f"the parts of {what} have different numbers of dims, or other ones than the whole"
            " tensor: copy or save the checkpoint again, or mend the program that gives them"
        )
    ends = zip(*(end for _, end in boxes), strict=True)
    shape = tuple(map(max, ends)) if whole is None else whole
    for box in boxes:
        if any(not 0 <= low <= high <= size for low, high, size in zip(*box, shape, strict=True)):
            raise IntegrityFailure(
                f"a part of {what} lies outside the whole tensor: its checkpoint is damaged, so"
                " copy or save it again"
            )
    held = sum(math.prod(b - a for a, b in zip(*box, strict=True)) for box in boxes)
    size = math.prod(shape)
    if held < size:
        raise IntegrityFailure(
            f"the parts of {what} hold {held} of its {size} elements: some are missing, so copy or"
            " save the checkpoint again, or mend the program that gives them"
        )
    # Elements are marked: comparing boxes pair by pair would be quadratic in their number.
    if len(boxes) > 1:
        is_held = np.zeros(shape, np.bool_)
        for start, end in boxes:
            is_held[tuple(map(slice, start, end))] = True
        if held > size or not is_held.all():
            raise IntegrityFailure(
                f"the parts of {what} overlap, so copy or save the checkpoint again, or mend the"
                f" program that gives them: together they hold {held} elements, and the whole"
                f" tensor has {size}"
            )


class TensorDifference(NamedTuple):
    """Largest deviation of one tensor in one iteration, counted from 0, from the reference's
    tensor: its size, infinite if an element is NaN or missing, its place as a phrase, the number of
    elements compared, and the tolerance."""

    largest: float
    """Largest difference of an element; infinite if it is NaN, if a part lies outside the whole
    tensor, or if the tensor or some of its elements are missing."""
    iteration: int
    tensor: str
    where: str
    """Phrase that follows the size in a sentence, such as "at [0, 3] on rank 1"."""
    elements: int
    tolerance: float

    @property
    def is_within(self) -> bool:
        """True if the largest difference does not exceed the tolerance."""
        return self.largest <= self.tolerance

    def sentence(self, reference: str, of: str = "iteration") -> str:
        """Return a phrase such as `wte in iteration 1 differs from R by 1.0e-03 at [0, 3]`: the
        tensor, the word `of` and the number of the iteration, from 1, then `reference`, the name of
        what the tensor was compared with, the largest difference, and the place. The tolerance is
        not in it."""
        return (
            f"{self.tensor} in {of} {self.iteration + 1} differs from {reference} by"
            f" {self.largest:.1e} {self.where}"
        )


def compare(part: TensorPart, whole: Array, rank: str, tolerance: float) -> TensorDifference:
    """Return a TensorDifference: the largest difference of an element between a TensorPart,
    computed on the rank that is called `rank`, and the reference's array of the same tensor,
    `whole`, with the given tolerance. It is infinite for a NaN or an infinity in either, also if
    both are equal, and for a part that lies outside the whole tensor."""
    expected = (
        whole[tuple(map(slice, part.start, part.end))]
        if len(part.start) == whole.ndim
        else np.empty(0)
    )
    if expected.shape != part.value.shape:
        where = (
            f"on {rank}: a part of it is at {list(part.start)} to {list(part.end)}, and the whole"
            f" has shape {list(whole.shape)}"
        )
        return TensorDifference(np.inf, part.iteration, part.tensor, where, 0, tolerance)
    distance = np.abs(part.value.astype(np.float64) - expected)
    distance = np.where(np.isnan(distance), np.inf, distance)
    worst = np.unravel_index(int(distance.argmax()), distance.shape)
    index = [int(a + n) for a, n in zip(part.start, worst, strict=True)]
    where = f"at {index} on {rank}" if index else f"on {rank}"
    return TensorDifference(
        float(distance[worst]), part.iteration, part.tensor, where, part.value.size, tolerance
    )


def merge(
    differences: Iterable[TensorDifference], reference: Mapping[Key, Array]
) -> list[TensorDifference]:
    """Return a list with one TensorDifference for each key of `reference`, (iteration, tensor name)
    → array, in its order: the largest of the `differences` of the tensor's parts, or an infinite
    one if fewer elements were compared than the tensor has. The field `elements` is the sum over
    the parts; an element that several ranks computed counts for each of them. Raises KeyError for a
    difference of a tensor that `reference` does not have."""
    merged_parts: dict[Key, list[TensorDifference]] = {key: [] for key in reference}
    for difference in differences:
        merged_parts[difference.iteration, difference.tensor].append(difference)
    merged = []
    for (iteration, tensor), parts in merged_parts.items():
        elements = sum(part.elements for part in parts)
        if (
            not any(part.largest == np.inf for part in parts)
            and elements < reference[iteration, tensor].size
        ):
            where = (
                f"as ranks computed only {elements} of its {reference[iteration, tensor].size}"
                " elements"
            )
            merged.append(TensorDifference(np.inf, iteration, tensor, where, elements, 0.0))
        else:
            merged.append(max(parts)._replace(elements=elements))
    return merged


def tolerances(
    whole: Mapping[Key, Array], moved: Sequence[Mapping[Key, Array]], precision: str
) -> dict[Key, float]:
    """Return a dict (iteration, tensor name) → tolerance T (`tensor_tolerance`) for every tensor of
    the reference, `whole`, from the same tensors in the perturbed runs, `moved`: dicts with the
    same keys, each tensor an array. The number of layers is read from the tensors' names;
    `precision` is the weights' number format, such as `bf16`."""
    matches = [re.search(r"\blayers\.(\d+)", name) for _, name in whole]
    numbers = [int(match[1]) for match in matches if match]
    layers = max(numbers, default=-1) + 1
    draws = {key: [draw[key] for draw in moved] for key in whole}
    return {
        key: tensor_tolerance(key[1], whole[key], draws[key], layers, precision) for key in whole
    }


def factor(num_layers: int) -> float:
    """Return TAIL · √R, the factor of the tolerance for a network of `num_layers` layers, where R =
    2 · (8 · num_layers + 4) is its number of roundings in a row."""
    return TAIL * math.sqrt(2 * (8 * num_layers + 4))


def tensor_tolerance(
    tensor: str, first: ArrayLike, draws: Sequence[ArrayLike], num_layers: int, precision: str
) -> float:
    """Return by how much one tensor may differ from the reference through rounding alone: TAIL · √R
    · (S + u₃₂ · |x|) + 2u · |x|. S is the largest distance of its values in the perturbed runs,
    `draws`, from its value in the reference, `first`; |x| is the largest absolute value of an
    element of `first`; R is the number of roundings in a network of `num_layers` layers.

    u₃₂ is fp32's unit round-off. u is bf16's for outputs, their gradients and updated weights,
    which the name `tensor` tells, if `precision` is bf16, else u₃₂.
    """
    base = np.asarray(first, np.float64)
    spread = max(
        (float(np.abs(np.asarray(draw, np.float64) - base).max()) for draw in draws if base.size),
        default=0.0,
    )
    unit = 2.0**-8 if precision == "bf16" and tensor.startswith(HELD_IN_BF16) else UNIT_FP32
    size = float(np.abs(base).max(initial=0.0))
    return factor(num_layers) * (spread + UNIT_FP32 * size) + 2 * unit * size


def curve_tolerance(first: ArrayLike, draws: Sequence[ArrayLike], num_layers: int) -> list[float]:
    """Return the tolerance T (`tensor_tolerance`, with u = u₃₂) of each number of a curve over
    iterations, as a list, from the curve in the reference, `first`, and in the perturbed runs,
    `draws`, at least one. The spread is the largest up to that iteration. The network has
    `num_layers` layers."""
    base = np.asarray(first, np.float64)
    spread = np.max([np.abs(np.asarray(draw, np.float64) - base) for draw in draws], axis=0)
    size = UNIT_FP32 * np.abs(base)
    allowed = factor(num_layers) * (np.maximum.accumulate(spread) + size) + 2 * size
    return [float(value) for value in allowed]
