"""Tensors of a divided model in files, found again by global name at any layout.

Each tensor- and pipeline-parallel rank writes its parts to one safetensors file; `index.json` has for each global name
the whole shape, the dim along which it is divided and the files that hold the parts in order.
"""

import errno
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.checkpoint.statistics import Numbers, merge, to_json
from engine.parallel.sharding import ShardedParameter
from lineage.chain import INDEX
from lineage.errors import IntegrityFailure

FILE_NAME = re.compile(r"\w[\w.-]*")
Entry = dict[str, Any]
"""{"shape": whole shape, "dim": int or None, "files": names in the order of the parts}"""


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write this rank's parts. Raises OSError when the file cannot be written."""
    try:
        save_file({name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # it has the errno in its text only
        number = re.search(r"(?:os error|code:) (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from error


def describe(
    parts: Iterable[tuple[str, ShardedParameter]], file: str, numbers: Mapping[str, Numbers]
) -> dict[str, Entry]:
    """Entries of one rank's file, for the index and the statistics."""
    return {
        name: {"shape": list(p.global_shape), "dim": p.dim, "part": p.axis.rank, "file": file, "numbers": numbers[name]}
        for name, p in parts
    }


def merge_descriptions(descriptions: Iterable[dict[str, Entry]]) -> tuple[dict[str, Entry], dict[str, Any]]:
    """Index and statistics of all ranks' files. An undivided tensor is taken from the first file that has it."""
    merged: dict[str, Entry] = {}
    for description in descriptions:
        for name, part in description.items():
            entry = merged.setdefault(name, {"shape": part["shape"], "dim": part["dim"], "parts": {}})
            number = part["part"] if part["dim"] is not None else 0
            entry["parts"].setdefault(number, (part["file"], part["numbers"]))
    index, statistics = {}, {}
    for name, entry in merged.items():
        files, numbers = zip(*(entry["parts"][i] for i in sorted(entry["parts"])), strict=True)
        index[name] = {"shape": entry["shape"], "dim": entry["dim"], "files": list(files)}
        statistics[name] = to_json(merge(numbers))
    return index, statistics


def read_whole(directory: Path, index: dict[str, Entry], name: str) -> torch.Tensor:
    """A whole tensor in its own number format.

    Raises IntegrityFailure if the index or a file lacks it.
    """
    parts = []
    try:
        for file in index[name]["files"]:
            _check_file_name(directory, file)
            with safe_open(directory / file, framework="pt") as opened:
                parts.append(opened.get_tensor(name))
        whole = torch.cat(parts, index[name]["dim"]) if len(parts) > 1 else parts[0]
    except (SafetensorError, OSError, KeyError, TypeError, RuntimeError, IndexError) as error:
        raise IntegrityFailure(f"{directory}: tensor {name!r} cannot be read: {error}") from error
    if list(whole.shape) != index[name]["shape"]:
        raise IntegrityFailure(f"{directory}: {name} has shape {list(whole.shape)}, not {index[name]['shape']}")
    return whole


def read_into(
    directory: Path, index: dict[str, Entry], wanted: Iterable[tuple[str, ShardedParameter, torch.Tensor]]
) -> None:
    """Copy this rank's part of each wanted tensor into place, from a checkpoint of any layout.

    Raises IntegrityFailure for missing, unexpected or misshapen tensors and for files that cannot be read.
    """
    with ExitStack() as stack:
        opened: dict[str, Any] = {}

        def file(name: str) -> Any:
            if name not in opened:
                opened[name] = stack.enter_context(safe_open(directory / name, framework="pt"))
            return opened[name]

        try:
            for name, parameter, target in wanted:
                _read_part(name, _entry_of(directory, index, name, parameter.global_shape), parameter, target, file)
        except (SafetensorError, OSError, KeyError, TypeError) as error:
            raise IntegrityFailure(f"{directory} cannot be read: {error}") from error


def stored_dtype(directory: Path, index: dict[str, Entry]) -> torch.dtype:
    """Number format of the first tensor of the index, which is that of all weights.

    Raises IntegrityFailure if it is not a training format or the file cannot be read.
    """
    try:
        name, entry = next(iter(index.items()))
        with safe_open(directory / Path(entry["files"][0]).name, framework="pt") as file:
            stored = str(file.get_slice(name).get_dtype())
    except (SafetensorError, OSError, KeyError, TypeError, IndexError, StopIteration) as error:
        raise IntegrityFailure(f"{directory} cannot be read: {error}") from error
    formats = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    if stored not in formats:
        raise IntegrityFailure(f"{directory}: {name} holds {stored} numbers, not one of {', '.join(formats)}")
    return formats[stored]


def check_entries(directory: Path, index: dict[str, Entry], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise IntegrityFailure unless the index describes exactly the whole model's tensors, by name and shape."""
    if unexpected := sorted(index.keys() - shapes.keys()):
        raise IntegrityFailure(
            f"{directory}: tensor {unexpected[0]!r} is unexpected ({len(unexpected)} such tensors): another model's?"
        )
    for name, shape in shapes.items():
        _entry_of(directory, index, name, shape)


def _entry_of(directory: Path, index: dict[str, Entry], name: str, shape: tuple[int, ...]) -> Entry:
    if name not in index:
        raise IntegrityFailure(f"{directory}: tensor {name!r} is missing")
    entry = index[name]
    if not isinstance(entry, dict) or not _is_list_of(entry.get("shape"), int):
        raise IntegrityFailure(f"{directory}: {INDEX} does not describe tensor {name!r}")
    if tuple(entry["shape"]) != shape:
        raise IntegrityFailure(f"{directory}: {name} has shape {entry['shape']}, the model's is {list(shape)}")
    if not _is_list_of(entry.get("files"), str) or entry.get("dim") not in (None, *range(len(shape))):
        raise IntegrityFailure(f"{directory}: {INDEX} does not say where tensor {name!r} is")
    for file in entry["files"]:
        _check_file_name(directory, file)
    return entry


def _check_file_name(directory: Path, name: str) -> None:
    if not FILE_NAME.fullmatch(name):
        raise IntegrityFailure(f"{directory}: the index names {name!r}, which is not a file of the checkpoint")


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is kind for item in value)


def _read_part(name: str, entry: Entry, parameter: ShardedParameter, target: torch.Tensor, file: Any) -> None:
    dim, files, own = entry["dim"] or 0, entry["files"], parameter.dim
    cut: list[slice] = [slice(size) for size in parameter.global_shape]
    if own is not None:
        start = parameter.axis.rank * target.shape[own]
        cut[own] = slice(start, start + target.shape[own])
    size, rest = divmod(parameter.global_shape[dim], len(files))
    if rest:
        raise IntegrityFailure(f"{name} of {parameter.global_shape[dim]} rows is divided over {len(files)} files")
    start, end, _ = cut[dim].indices(parameter.global_shape[dim])
    for number, source in enumerate(files):
        low, high = max(start, number * size), min(end, (number + 1) * size)
        if low < high:
            cut[dim] = slice(low - number * size, high - number * size)
            _copy(name, target.narrow(dim, low - start, high - low), file(source).get_slice(name)[tuple(cut)])


def _copy(name: str, target: torch.Tensor, source: torch.Tensor) -> None:
    if source.shape != target.shape or not source.is_floating_point():
        raise IntegrityFailure(
            f"{name}: a file holds {source.dtype} of shape {list(source.shape)}, "
            f"not weights of shape {list(target.shape)}"
        )
    target.copy_(source)
