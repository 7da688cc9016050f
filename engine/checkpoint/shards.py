"""Tensors of a divided model in files, read by global name at any layout.

Each tensor- and pipeline-parallel rank writes its parts to one safetensors file; `index.json` has
for each global name the whole shape, the dim along which it is divided and the files that hold the
parts in order.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mlm_repro.engine.checkpoint.statistics import FILE, Numbers, merge, to_json
from mlm_repro.engine.parallel.sharding import ShardedParameter
from mlm_repro.lineage.atomic import JSON, write_json
from mlm_repro.lineage.chain import INDEX
from mlm_repro.lineage.errors import IntegrityFailure, cause

NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
# A name and no path: an index that was edited must not lead out of the checkpoint.
FILE_NAME = re.compile(r"\w[\w.-]*")
Entry = JSON
"""Entry of a tensor in index.json: {"shape": whole shape, "dim": divided dim or None, "files":
names in the order of the parts}."""
Wanted = Iterable[tuple[str, ShardedParameter, int, Tensor]]
"""Iterable of a tuple (name, ShardedParameter, index in this rank's part of the first element to
read, target) for each tensor to read."""


def write_shard(
    path: Path, shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]], tensors: Iterable[Tensor]
) -> str:
    """Write tensors to the safetensors file `path`, sync it, and return its SHA-256, hexadecimal.
    `shapes` has name → (dtype, shape), of dtypes in NAMES. `tensors` yields the tensors alone, of
    these dtypes and shapes and in the same order, which is not checked; they are taken one at a
    time, so that memory holds one.

    With a single dtype and names in alphabetical order, the file is the one that the safetensors
    library would write. Raises OSError when the file cannot be written, and KeyError for another
    dtype.
    """
    header: JSON = {}
    end = 0
    digest = hashlib.sha256()
    for name, (dtype, shape) in shapes.items():
        start = end
        end += dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # As the library pads it, so that the file is the library's own, byte for byte.
    text += b" " * (-len(text) % 8)
    # Lazily: the library's own writer takes all tensors at once, which doubles the memory of a
    # rank. Without a copy as bytes, during which no other thread could run Python.
    flat: Iterator[Any] = (
        tensor.detach().reshape(-1).cpu().view(torch.uint8).numpy() for tensor in tensors
    )
    with path.open("wb") as file:
        for data in chain([len(text).to_bytes(8, "little") + text], flat):
            digest.update(data)
            file.write(data)
        file.flush()
        # On disk before the seal is: after a power cut a sealed checkpoint is whole.
        os.fsync(file.fileno())
    return digest.hexdigest()


def describe(
    parts: Iterable[tuple[str, ShardedParameter]], file: str, numbers: Mapping[str, Numbers]
) -> dict[str, Entry]:
    """Return a dict name → description of each tensor in `file`, the name of one rank's file, for
    `write_index`. `parts` has the tensors as pairs (name, parameter), `numbers` the Numbers of this
    rank's part of each by name. A description is a dict with five keys: `shape`, a list, the whole
    tensor's; `dim`, along which it is divided, or None; `part`, the number of this rank's part;
    `file`, the argument; and `numbers`, the Numbers of this rank's part, one tuple."""
    return {
        name: {
            "shape": list(p.global_shape),
            "dim": p.dim,
            "part": p.axis.rank,
            "file": file,
            "numbers": numbers[name],
        }
        for name, p in parts
    }


def write_index(directory: Path, descriptions: Iterable[dict[str, Entry]]) -> None:
    """Merge `descriptions`, the results of `describe` on all ranks, and write two files into the
    checkpoint `directory`: index.json, tensor name → whole shape, divided dim and files, and
    statistics.json, tensor name → statistics of the whole tensor. One rank alone calls it."""
    merged: dict[str, dict[int, Entry]] = {}
    for name, part in chain.from_iterable(description.items() for description in descriptions):
        # A whole tensor comes from several ranks with equal bits; the first file that has it is
        # named.
        merged.setdefault(name, {}).setdefault(part["part"] if part["dim"] is not None else 0, part)
    index = {}
    statistics = {}
    for name, by_number in merged.items():
        parts = [by_number[number] for number in sorted(by_number)]
        whole = {key: parts[0][key] for key in ("shape", "dim")}
        index[name] = {**whole, "files": [part["file"] for part in parts]}
        statistics[name] = to_json(merge(part["numbers"] for part in parts))
    write_json(directory / INDEX, index)
    write_json(directory / FILE, statistics)


@contextmanager
def reading(place: Path) -> Iterator[None]:
    """Context manager: turn the errors with which a file shows that it is unreadable or malformed
    (SafetensorError, OSError, UnicodeDecodeError, KeyError, TypeError, IndexError, StopIteration)
    into an IntegrityFailure that names `place`. Other errors pass."""
    try:
        yield
    except (
        SafetensorError,
        OSError,
        UnicodeDecodeError,
        KeyError,
        TypeError,
        IndexError,
        StopIteration,
    ) as error:
        raise IntegrityFailure(
            f"{place} cannot be read: {cause(error)}; if it is damaged, copy or save it again"
        ) from error


def read_into(directory: Path, index: dict[str, Entry], wanted: Wanted) -> None:
    """Fill the target of each `wanted` tuple (name, parameter, first element, target) with
    consecutive elements of this rank's part of the tensor with that name, from the first element
    on. A target is flat, or has the part's shape and takes all of it; the target keeps its number
    format. `index` is the index.json of the checkpoint `directory`, which may be of any layout.

    Raises IntegrityFailure for tensors that are missing, of another shape in the index or not
    floating-point, and for files that cannot be read or hold too little. Other tensors of the index
    are not looked at.
    """
    with reading(directory), ExitStack() as stack:
        # A file is opened once for all tensors that lie in it.
        @cache
        def file(name: str) -> Any:
            return stack.enter_context(safe_open(directory / name, framework="pt"))

        for name, parameter, start, target in wanted:
            entry = entry_of(directory, index, name, parameter.global_shape)
            _read_run(directory, name, entry, parameter, start, target, file)


def stored_dtype(directory: Path, index: dict[str, Entry]) -> torch.dtype:
    """Return the number format of the tensor that comes first in `index`, as its file in the
    checkpoint `directory` states it, as a torch dtype. All weights have the same format, but this
    is not checked.

    Raises IntegrityFailure if it is not a training format, if the index is empty or if the file
    cannot be read.
    """
    with reading(directory):
        name, entry = next(iter(index.items()))
        # The last part of the name alone, because the entry is not checked yet.
        with safe_open(directory / Path(entry["files"][0]).name, framework="pt") as file:
            stored = str(file.get_slice(name).get_dtype())
    formats = {name: dtype for dtype, name in NAMES.items()}
    if stored not in formats:
        raise IntegrityFailure(
            f"{directory}: tensor {name!r} holds {stored} numbers: copy or save the checkpoint"
            f" again, in one of the formats {', '.join(formats)}"
        )
    return formats[stored]


def entry_of(directory: Path, index: dict[str, Entry], name: str, shape: tuple[int, ...]) -> Entry:
    """Return the entry of the tensor `name` in `index`, the index.json of the checkpoint
    `directory`: a dict with its whole shape, divided dim and file names. Raises IntegrityFailure if
    the index has no such entry, one of a shape other than `shape`, or one without a valid dim or
    plain file names. That the files exist is not checked."""
    if name not in index:
        raise IntegrityFailure(
            f"{directory}: {INDEX} has no tensor {name!r}, which the model or its optimizer needs:"
            " the index is damaged or of another model, so copy or save the checkpoint again"
        )
    entry = index[name]
    if not isinstance(entry, dict) or not _is_list_of(entry.get("shape"), int):
        raise IntegrityFailure(
            f"{directory}: the entry of tensor {name!r} in {INDEX} has no list of sizes as its"
            " shape: the checkpoint is damaged, so copy or save it again"
        )
    if tuple(entry["shape"]) != shape:
        raise IntegrityFailure(
            f"{directory}: tensor {name!r} has shape {entry['shape']} in {INDEX}, and the model"
            f" needs {list(shape)}: the index is damaged or of another model, so copy or save the"
            " checkpoint again"
        )
    if not _is_list_of(entry.get("files"), str) or entry.get("dim") not in (
        None,
        *range(len(shape)),
    ):
        raise IntegrityFailure(
            f"{directory}: the entry of tensor {name!r} in {INDEX} has no list of file names, or no"
            " valid dim: the checkpoint is damaged, so copy or save it again"
        )
    for file in entry["files"]:
        check_file_name(directory, file)
    return entry


def check_file_name(directory: Path, name: str) -> None:
    """Raise IntegrityFailure if `name`, from the index of the checkpoint `directory`, is not a
    plain file name of letters, digits, `_`, `.` and `-` that begins with neither `.` nor `-`: a
    path could lead out of the checkpoint."""
    if not FILE_NAME.fullmatch(name):
        raise IntegrityFailure(
            f"{directory}: {INDEX} names the file {name!r}, which is not a plain name of a file in"
            " the checkpoint: the index was changed, so copy or save the checkpoint again"
        )


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is kind for item in value)


def _read_run(
    directory: Path,
    name: str,
    entry: Entry,
    parameter: ShardedParameter,
    start: int,
    target: Tensor,
    file: Any,
) -> None:
    """Fill the target with consecutive elements of this rank's part of the tensor `name`, which
    `parameter` describes, from element `start` of the part on. `entry` is the tensor's entry in the
    index. The target is flat, or is the whole part; an empty one is left alone. `file` is a
    function that opens a file of the checkpoint `directory` by its name; its errors are passed on.
    Raises IntegrityFailure if the numbers are not floating-point, the tensor in a file is too
    small, or the number of files does not divide the dim; a tensor that is too large is not
    noticed."""
    shape = parameter.local.shape
    count = target.numel()
    if not count:
        return
    if count == parameter.local.numel():
        _read_part(directory, name, entry, parameter, 0, target.view(shape), file)
        return
    # The library reads whole rows; an owner of a divided state begins and ends within one.
    row = math.prod(shape[1:])
    first = start // row
    last = -(-(start + count) // row)
    rows = target.new_empty(last - first, *shape[1:])
    _read_part(directory, name, entry, parameter, first, rows, file)
    target.copy_(rows.view(-1)[start - first * row :][:count])


def _read_part(
    directory: Path,
    name: str,
    entry: Entry,
    parameter: ShardedParameter,
    first: int,
    target: Tensor,
    file: Any,
) -> None:
    """Fill the target with rows, along dim 0, of this rank's part of the tensor `name`, which
    `parameter` describes, from row `first` of the part on. `entry`, from the index, says which
    files of the checkpoint `directory` hold the tensor; `file` is a function that opens one of
    these files by its name; its errors are passed on. Raises IntegrityFailure if the numbers are
    not floating-point, the tensor in a file is too small, or the number of files does not divide
    the dim; a tensor that is too large is not noticed."""
    dim = entry["dim"] or 0
    files = entry["files"]
    own = parameter.dim
    # Only the rows that this rank needs are read from each file, so no rank ever holds a whole
    # tensor of another layout.
    cut = [slice(size) for size in parameter.global_shape]
    if own is not None:
        begin = parameter.axis.rank * parameter.local.shape[own]
        cut[own] = slice(begin, begin + parameter.local.shape[own])
    begin = (cut[0].start or 0) + first
    cut[0] = slice(begin, begin + target.shape[0])
    # Parts are equal by construction; a file list of another length was edited.
    size, rest = divmod(parameter.global_shape[dim], len(files))
    if rest:
        raise IntegrityFailure(
            f"the index of the checkpoint {directory}, {INDEX}, was changed: it names {len(files)}"
            f" files for the tensor {name!r}, whose {parameter.global_shape[dim]} rows or columns"
            " do not divide into as many equal parts; copy or save the checkpoint again"
        )
    start, end, _ = cut[dim].indices(parameter.global_shape[dim])
    for number, source in enumerate(files):
        low = max(start, number * size)
        high = min(end, (number + 1) * size)
        if low < high:
            cut[dim] = slice(low - number * size, high - number * size)
            _copy(
                directory / source,
                name,
                target.narrow(dim, low - start, high - low),
                file(source).get_slice(name)[tuple(cut)],
            )


def _copy(place: Path, name: str, target: Tensor, source: Tensor) -> None:
    # `copy_` would convert integers, and broadcast another shape, in silence.
    if source.shape != target.shape or not source.is_floating_point():
        raise IntegrityFailure(
            f"{place} is damaged, so copy or save its checkpoint again: the part of tensor"
            f" {name!r} in it is {source.dtype} of shape {list(source.shape)}, not floating-point"
            f" numbers of shape {list(target.shape)}"
        )
    target.copy_(source)
