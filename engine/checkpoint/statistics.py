"""Five numbers of each tensor, taken before it is written and compared when it is read.

A digest proves that a file did not change. These numbers prove that the file holds the tensors that
were in memory, and that every layout reads the tensors that the file holds. The checksum is a sum
over elements, so ranks that read parts of a tensor add theirs: any changed bit, and any two
elements exchanged, are found, and no rank reads more than its parts.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from mlm_repro.engine.parallel.mesh import Axis
from mlm_repro.engine.parallel.sharding import ShardedParameter
from mlm_repro.engine.run.files import STATISTICS as FILE
from mlm_repro.engine.run.files import TensorNumbers
from mlm_repro.lineage.errors import IntegrityFailure
from mlm_repro.lineage.files import parse_document, read_object

ROUNDING = 1e-9
"""Largest allowed relative difference between sums of squares in float64 whose parts are added in
another order."""
PART = 1 << 18
"""Number of elements that are added together, so that their float64 copy stays in the cache."""
Numbers = tuple[float, float, float, int, int]
"""(sum of squares, minimum, maximum, count of non-finite numbers, checksum) of a tensor or of a
rank's part."""
NOTHING: Numbers = (0.0, math.inf, -math.inf, 0, 0)
"""Numbers for a rank that has read no element of a tensor: as a part they change nothing in
`merge`."""
Loaded = dict[str, tuple[ShardedParameter, Numbers]]
"""Dict name of a tensor → pair of its ShardedParameter and the Numbers of the elements that this
rank has read."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def measure(tensor: Tensor, parameter: ShardedParameter | None = None, start: int = 0) -> Numbers:
    """Return the Numbers of a tensor, the tuple (sum of squares, minimum, maximum, number of
    non-finite elements, checksum). The first three leave out non-finite elements, and are 0 if no
    element is finite.

    If `parameter` is given, the tensor has consecutive elements, from `start` on, of this rank's
    part of that parameter. The checksum then counts each element at its index in the whole
    parameter, so that `merge` gives the whole parameter's checksum.
    """
    flat = tensor.detach().flatten()
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    # The bits weighted by their position in the whole tensor: exchanged elements change the sum,
    # and parts of any layout add up to the same number.
    for number, part in enumerate(flat.view(BITS[flat.element_size()]).split(PART)):
        first = 2 * (start + number * PART) + 1
        # 2n + 1 for the element n of this rank's part, then of the whole tensor.
        weights = torch.arange(first, first + 2 * part.numel(), 2, device=flat.device)
        if parameter and parameter.dim is not None and parameter.axis.size > 1:
            # From the index in this part to the index in the whole tensor, where other ranks' rows
            # lie between ours.
            row = 2 * math.prod(parameter.local.shape[parameter.dim :])
            above = torch.div(weights, row, rounding_mode="floor").mul_(parameter.axis.size - 1)
            weights.add_(above.add_(parameter.axis.rank), alpha=row)
        # Weights are odd: an odd number has an inverse modulo 2⁶⁴, so no change of one element is
        # lost. int64 wraps around, which is a sum modulo 2⁶⁴.
        total += (part * weights).sum()
    return *_range(flat), int(total.item()) % 2**64


def _range(flat: Tensor) -> tuple[float, float, float, int]:
    parts = map(Tensor.double, flat.split(PART))
    squares = torch.stack([torch.dot(part, part) for part in parts]).sum().item()
    # Almost always everything is finite, and a mask would cost another pass.
    finite = flat if math.isfinite(squares) else flat[torch.isfinite(flat)]
    if lost := len(flat) - len(finite):
        return *_range(finite)[:3], lost
    if not len(flat):
        return 0.0, 0.0, 0.0, 0
    least, greatest = torch.aminmax(flat)
    return squares, float(least), float(greatest), 0


def merge(parts: Iterable[Numbers]) -> Numbers:
    """Return a whole tensor's numbers, a tuple like `measure`'s, from the numbers of its parts, at
    least one: the smallest minimum, the largest maximum, and the sums of the other numbers, for the
    checksums modulo 2⁶⁴."""
    squares, least, greatest, lost, checksums = zip(*parts, strict=True)
    return math.fsum(squares), min(least), max(greatest), sum(lost), sum(checksums) % 2**64


def to_json(numbers: Numbers) -> dict[str, float | int]:
    """Return a tensor's numbers, a tuple from `measure`, as a dict with the keys of
    statistics.json: `norm` (the root of the sum of squares), `min`, `max`, `nonfinite` and
    `checksum`."""
    squares, least, greatest, lost, checksum = numbers
    return {
        "norm": math.sqrt(squares),
        "min": least,
        "max": greatest,
        "nonfinite": lost,
        "checksum": checksum,
    }


def differs(measured: Numbers, stored: Mapping[str, Any]) -> str | None:
    """Return a phrase that names the first difference of `measured`, a tuple from `measure`, from
    `stored`, an entry of statistics.json or a dict from `to_json`; None if they agree. Both are of
    one tensor, or of the same part of it. Norm, minimum, maximum, number of elements that are not
    finite and checksum are compared, in this order. The norm may differ by rounding, and a checksum
    that is not stored is not compared."""
    values = to_json(measured)
    # Another layout adds squares in another order; minimum, maximum and counts are exact at any.
    if not math.isclose(values["norm"], stored["norm"], rel_tol=ROUNDING, abs_tol=1e-300):
        return f"its norm is {values['norm']:.9g} and was {stored['norm']:.9g}"
    for name in ("min", "max", "nonfinite"):
        if values[name] != stored[name]:
            return f"its {name} is {values[name]:.9g} and was {stored[name]:.9g}"
    # None in checkpoints of early releases.
    if stored.get("checksum") not in (None, values["checksum"]):
        return "single numbers of it changed"
    return None


def has_checksums(directory: Path) -> bool:
    """Return True if the checkpoint's statistics.json exists, lists a tensor, and has for every
    tensor that it lists a checksum, which tells any change of a bit. Early releases wrote none.
    Raises IntegrityFailure if the file exists and cannot be read."""
    stored = read_object(directory / FILE) if (directory / FILE).is_file() else {}
    return bool(stored) and all(
        isinstance(numbers, dict) and "checksum" in numbers for numbers in stored.values()
    )


def check_written(
    file: Path, before: Mapping[str, Numbers], parameters: Mapping[str, ShardedParameter]
) -> None:
    """Read the tensors named in `before` back from a safetensors file, and compare their statistics
    with the ones in `before`, which `measure` took from the tensors in memory. A tensor named in
    `parameters` is this rank's part of that parameter; any other is whole.

    Raises IntegrityFailure naming the first tensor that differs. Errors of safetensors are passed
    on, such as SafetensorError for a file that is damaged or lacks a tensor.
    """
    with safe_open(file, framework="pt") as opened:
        for name, numbers in before.items():
            # The file is read back: its digest is of the bytes that were handed over, which may be
            # wrong themselves.
            if difference := differs(
                measure(opened.get_tensor(name), parameters.get(name)), to_json(numbers)
            ):
                raise IntegrityFailure(
                    f"{file}: tensor {name!r}, read back, is not what was in memory: {difference};"
                    " the checkpoint is not kept: check disk and memory, then run the command again"
                )


def check_loaded(
    directory: Path,
    loaded: Loaded,
    owners: Axis | None = None,
) -> None:
    """Compare the tensors that were read from the checkpoint `directory` with its statistics.json;
    without this file nothing is compared. `loaded` is a dict name → (parameter, numbers of the
    elements that this rank has read). Every rank of the axis along which parameters are divided
    (tensor-parallel, or data-parallel under ZeRO stage 3) calls it, because their numbers are
    merged.

    `owners` is a further axis, on which each rank has read elements that the others have not; all
    of its ranks call this too. Raises IntegrityFailure naming the first tensor that differs or that
    the statistics lack, or if statistics.json is damaged; other ranks of the mesh do not learn of
    it.
    """
    if not (directory / FILE).is_file():
        return
    stored = read_object(directory / FILE)
    measured = {name: numbers for name, (_, numbers) in sorted(loaded.items())}
    if owners:
        measured = _merge_over(owners, measured)
    # Undivided tensors are not merged, because every peer has read the whole of them.
    if divided := {name: measured[name] for name in measured if loaded[name][0].dim is not None}:
        measured |= _merge_over(loaded[next(iter(divided))][0].axis, divided)
    for name, numbers in measured.items():
        if name not in stored:
            raise IntegrityFailure(
                f"{directory}: {FILE}, which has numbers of each tensor from before it was saved,"
                f" has none of tensor {name!r}: the file was changed, so copy or save the"
                " checkpoint again"
            )
        if difference := differs(
            numbers, vars(parse_document(stored[name], TensorNumbers, f"{FILE}, {name}"))
        ):
            raise IntegrityFailure(
                f"{directory}: tensor {name!r} is not what was saved: {difference}; its file"
                " changed (copy or save the checkpoint again), or this machine misreads it (read it"
                " on another)"
            )


def _merge_over(axis: Axis, measured: Mapping[str, Numbers]) -> dict[str, Numbers]:
    everyone = axis.gather_objects(list(measured.values()))
    return {
        name: merge(parts)
        for name, parts in zip(measured, zip(*everyone, strict=True), strict=True)
    }
