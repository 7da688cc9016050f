"""Tensors of a checkpoint held against the statistics that were taken before it was written. Imports no torch."""

import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlm_repro.lineage.chain import INDEX
from mlm_repro.lineage.files import SAME, read_object

STATISTICS = "statistics.json"
BITS = {"F64": "<i8", "F32": "<i4", "F16": "<i2", "BF16": "<i2"}
FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
Bits = NDArray[np.signedinteger[Any]]


def wrong_tensors(checkpoint: Path) -> Iterator[str]:
    """A sentence for each tensor that its statistics are not of: by its checksum, or in older ones by its norm."""
    index, statistics = read_object(checkpoint / INDEX), read_object(checkpoint / STATISTICS)
    where = f"{checkpoint.name}/{STATISTICS}"
    if names := index.keys() ^ statistics.keys():
        yield f"{where} is not of the tensors in {INDEX}: {min(names)}"

    @cache
    def tensors(file: str) -> dict[str, tuple[str, Bits]]:
        return _tensors(checkpoint / Path(file).name)

    for name in index.keys() & statistics.keys():
        parts, stated = [tensors(file)[name] for file in index[name]["files"]], statistics[name]
        whole = np.concatenate([bits for _, bits in parts], index[name]["dim"]) if len(parts) > 1 else parts[0][1]
        kind, flat = parts[0][0], np.ascontiguousarray(whole).reshape(-1)
        if list(whole.shape) != index[name]["shape"]:
            yield f"{where}: {name} has another shape than {INDEX} says"
        elif "checksum" in stated:
            odd = np.arange(1, 2 * len(flat), 2, dtype=np.int64)
            if int(np.dot(flat.astype(np.int64), odd)) % 2**64 != stated["checksum"]:
                yield f"{where}: {name} has other numbers than were measured before it was written"
        elif kind in FLOATS:
            values = flat.view(FLOATS[kind]).astype(np.float64)
            norm = math.sqrt(float(np.dot(values, values)))
            if not math.isclose(norm, stated["norm"], rel_tol=SAME, abs_tol=1e-300) and not stated["nonfinite"]:
                yield f"{where}: {name} has the norm {norm:.9g} and had {stated['norm']:.9g}"


def _tensors(file: Path) -> dict[str, tuple[str, Bits]]:
    """Number format and bits of each tensor of a safetensors file."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    data = np.memmap(file, np.uint8, "r", 8 + size)
    return {
        name: (entry["dtype"], data[slice(*entry["data_offsets"])].view(BITS[entry["dtype"]]).reshape(entry["shape"]))
        for name, entry in header.items()
        if name != "__metadata__"
    }
