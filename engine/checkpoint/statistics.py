"""Four numbers of each tensor, taken before it is written and compared when it is read.

A digest proves that a file did not change. These numbers prove that the file holds what was in memory, and that what
was read, at any layout, is what the file holds.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from engine.parallel.mesh import Axis
from engine.parallel.sharding import ShardedParameter
from engine.run.files import TensorNumbers
from lineage.errors import Diverged, IntegrityFailure
from lineage.files import parse_document, read_object

FILE = "statistics.json"
ROUNDING = 1e-9
"""Relative difference of a sum of squares in float64 when its parts are added in another order."""
PART = 1 << 18
"""Numbers that are added together, so that their float64 copy stays in the cache."""
Numbers = tuple[float, float, float, int]
"""(sum of squares, least, greatest, count of non-finite numbers) of a tensor or of a rank's part."""


def measure(tensor: torch.Tensor) -> Numbers:
    """The four numbers of a tensor, in float64. Least and greatest leave out non-finite numbers; 0 without any."""
    flat = tensor.detach().flatten()
    parts = map(torch.Tensor.double, flat.split(PART))
    squares = torch.stack([torch.dot(part, part) for part in parts]).sum().item()
    finite = flat if math.isfinite(squares) else flat[torch.isfinite(flat)]
    if lost := len(flat) - len(finite):
        return *measure(finite)[:3], lost
    if not len(flat):
        return 0.0, 0.0, 0.0, 0
    least, greatest = torch.aminmax(flat)
    return squares, float(least), float(greatest), 0


def measure_finite(tensors: Mapping[str, torch.Tensor]) -> dict[str, Numbers]:
    """The four numbers of each tensor. Raises Diverged naming the first tensor that is not finite."""
    measured = {name: measure(tensor) for name, tensor in tensors.items()}
    for name, (*_, lost) in measured.items():
        if lost:
            raise Diverged(f"{name} holds {lost} numbers that are not finite: no checkpoint is written")
    return measured


def merge(parts: Iterable[Numbers]) -> Numbers:
    """The numbers of a tensor from those of its parts."""
    squares, least, greatest, lost = zip(*parts, strict=True)
    return math.fsum(squares), min(least), max(greatest), sum(lost)


def to_json(numbers: Numbers) -> dict[str, float | int]:
    """The numbers as `statistics.json` has them."""
    squares, least, greatest, lost = numbers
    return {"norm": math.sqrt(squares), "min": least, "max": greatest, "nonfinite": lost}


def differs(measured: Numbers, stored: Mapping[str, Any]) -> str | None:
    """The first difference from the numbers of the file, in words; None if there is none."""
    values = to_json(measured)
    if not math.isclose(values["norm"], stored["norm"], rel_tol=ROUNDING, abs_tol=1e-300):
        return f"its norm is {values['norm']:.9g} and was {stored['norm']:.9g}"
    for name in ("min", "max", "nonfinite"):
        if values[name] != stored[name]:
            return f"its {name} is {values[name]:.9g} and was {stored[name]:.9g}"
    return None


def check_written(file: Path, before: Mapping[str, Numbers]) -> None:
    """Read a file of tensors again and compare. Raises IntegrityFailure naming the first tensor that differs."""
    with safe_open(file, framework="pt") as opened:
        for name, numbers in before.items():
            if difference := differs(measure(opened.get_tensor(name)), to_json(numbers)):
                raise IntegrityFailure(f"{file}: tensor {name!r} was not written as it is in memory: {difference}")


def check_loaded(directory: Path, loaded: Mapping[str, tuple[ShardedParameter, Numbers]]) -> None:
    """Compare the tensors that this rank and its tensor-parallel peers have read with what was written; a collective.

    Raises IntegrityFailure, on each of these ranks, naming the first tensor that differs. An old checkpoint without
    statistics is not compared.
    """
    if not (directory / FILE).is_file():
        return
    stored = read_object(directory / FILE)
    measured = {name: numbers for name, (_, numbers) in sorted(loaded.items())}
    divided = [name for name in measured if loaded[name][0].dim is not None]
    if divided:
        parameter = loaded[divided[0]][0]
        whole = _merge_over(parameter.axis, [measured[name] for name in divided], parameter.local.device)
        measured |= zip(divided, whole, strict=True)
    for name, numbers in measured.items():
        if name not in stored:
            raise IntegrityFailure(f"{directory}: {FILE} does not have tensor {name!r}")
        if difference := differs(numbers, vars(parse_document(stored[name], TensorNumbers, f"{FILE}, {name}"))):
            raise IntegrityFailure(f"{directory}: tensor {name!r} is not what was saved: {difference}")


def _merge_over(axis: Axis, rows: list[Numbers], device: torch.device) -> list[Numbers]:
    if axis.size == 1:
        return rows
    mine = torch.tensor(rows, dtype=torch.float64, device=device).unsqueeze(0)  # [1, tensors, 4]
    everyone = axis.all_gather(mine, dim=0).tolist()
    return [merge((s, low, high, int(lost)) for s, low, high, lost in parts) for parts in zip(*everyone, strict=True)]
