"""Pickled files of PyTorch, read so that nothing runs that a file names, and Megatron-Core's
`torch_dist` checkpoints.

`torch_dist` is torch's distributed checkpoint (`.distcp`) with Megatron-Core's names. Every tensor
is whole, whatever layout wrote it. A parameter of all layers is one tensor, [num_layers, ...].
Layer norms have the names of Transformer Engine, in the linear layer that follows. Sources:
megatron-core 0.16.1, `dist_checkpointing/strategies/torch.py`; torch,
`distributed/checkpoint/filesystem.py`.
"""

import argparse
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from textwrap import shorten
from typing import Any, Self

import torch
import torch.distributed.checkpoint as distributed
from torch import serialization
from torch.distributed.checkpoint import filesystem, metadata

from mlm_repro.engine.compare.tensors import check_cover
from mlm_repro.engine.published import METADATA
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.errors import IntegrityFailure

UNREAD = (
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "fp16.loss_scaler.LossScaler",
    "fp16.loss_scaler.DynamicLossScaler",
    "megatron.fp16.loss_scaler.LossScaler",
    "megatron.fp16.loss_scaler.DynamicLossScaler",
    "megatron.enums.ModelType",
    "megatron.model.enums.ModelType",
    "megatron.core.enums.ModelType",
    "megatron.core.transformer.enums.AttnBackend",
    "signal.Signals",
    "_io.BytesIO",
)
"""Dotted names of classes and functions in Megatron-LM checkpoints whose objects no model needs.
Each call of one makes an `Unread`.

They are random state of numpy before and since version 2, loss scalers that were pickled whole
(2019 and v1.0), values of arguments, and Transformer Engine's `_extra_state`.
"""
COMMON = "common.pt"
CLASSES = (
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.TensorStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.TensorProperties,
    metadata._MEM_FORMAT_ENCODING,
    metadata.BytesStorageMetadata,
    metadata.StorageMeta,
    filesystem._StorageInfo,
    serialization._get_layout,
)
"""Classes of a distributed checkpoint's metadata that are unpickled: they say where each tensor
lies."""
KNOWN: JSON = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in CLASSES}
KNOWN |= {"torch.Size": torch.Size} | {
    str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
PLANS = re.compile(
    r"pathlib\.\w+|torch\.distributed\.checkpoint\.planner\.\w+|megatron\.core\.[\w.]+\.MCore\w+"
)
"""Regular expression of the names of the metadata's other classes: plans of the process that wrote
it, which no reader needs."""
STACKED = re.compile(r"(.*\blayers)\.([a-z].*)")
OPTIMIZER = re.compile(r"(.*\.)?optimizer\..*")


class Unread:
    """Stand-in for an object that no model needs, of a class in `UNREAD` or, in the metadata of a
    distributed checkpoint, of a class that `PLANS` matches: it takes any arguments and state, and
    keeps nothing."""

    def __new__(cls, *_: Any) -> Self:
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


def read_torch_file(path: Path) -> Any:
    """Return the object, mostly a dict, in a file that `torch.save` wrote, in the zip format or the
    one before torch 1.6, with tensors on the CPU. Tensors of the zip format are mapped from the
    file, not read.

    Objects of the classes in `UNREAD` become `Unread`. Raises IntegrityFailure if the file is
    missing, damaged or compressed, or names any other function or class but argparse.Namespace and
    the ones that torch loads with `weights_only`.
    """
    names: list[Any] = [argparse.Namespace, *((Unread, name) for name in UNREAD)]
    # Other libraries in this process may allow more classes: set aside here, restored at the end.
    others = serialization.get_safe_globals()
    serialization.clear_safe_globals()
    try:
        # A compressed member could unpack to far more memory than the file is large.
        if is_zip := zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                    raise ValueError("it is compressed, so it was not written by torch.save")
        with serialization.safe_globals(names):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # a damaged file makes torch raise nearly anything
        if match := re.search(r"GLOBAL (\S+?)[,.;:]?(?:\s|$)", str(error)):
            raise _refused(path, match[1] if "." in match[1] else f"builtins.{match[1]}") from error
        raise IntegrityFailure(
            f"{path} cannot be read as a PyTorch file, so copy or save it again:"
            f" {_first_line(error)}"
        ) from error
    finally:
        serialization.add_safe_globals(others)


def _read_pickle(path: Path) -> Any:
    """Return the object in the pickled file `path`, the metadata of a distributed checkpoint: a
    Metadata of torch if the file is sound, which the caller checks. The file may name the classes
    in KNOWN, and the ones that PLANS matches, whose objects become `Unread`. Raises
    IntegrityFailure for any other name and for a missing or damaged file."""

    # Not the unpickler in C: it reserves memory for any size that a damaged file states.
    class Restricted(pickle._Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            full = f"{module}.{name}"
            if full not in KNOWN and not PLANS.fullmatch(full):
                raise _refused(path, full)
            return KNOWN.get(full, Unread)

    try:
        with path.open("rb") as file:
            return Restricted(file).load()
    except IntegrityFailure:
        raise
    except Exception as error:  # a damaged file makes pickle raise nearly anything
        raise IntegrityFailure(
            f"{path} cannot be read, so copy or save it again: {_first_line(error)}"
        ) from error


def _refused(path: Path, name: str) -> IntegrityFailure:
    return IntegrityFailure(
        f"{path} names {name}, which is not among what a checkpoint may load: the file is refused,"
        " and nothing in it was run"
    )


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's text, shortened to at most 200 characters at a word,
    without torch's advice to load unsafely; the name of the error's class if it has no text."""
    message = str(error).rpartition("WeightsUnpickler error: ")[2].strip() or type(error).__name__
    return shorten(message.splitlines()[0], 200, placeholder=" …")


class _Reader(distributed.FileSystemReader):
    """Torch's reader of a distributed checkpoint's directory, which is given the metadata `known`
    and does not read the file: torch would unpickle it without restriction."""

    def __init__(self, directory: Path, known: metadata.Metadata) -> None:
        super().__init__(directory)
        self.known = known

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        return self.known


def read_torch_dist(directory: Path) -> JSON:
    """Return the weights of a distributed checkpoint's directory in the form of one rank's
    Megatron-LM file: a dict with `model`, itself a dict name → tensor on the CPU, where a tensor of
    all layers is cut into one for each; `checkpoint_version`, always 3; and `args` and `iteration`
    if common.pt has them.

    The optimizer's tensors and pickled objects are not read. Raises IntegrityFailure for missing or
    damaged metadata, a damaged common.pt, and shards that are missing or damaged, overlap or leave
    holes.
    """
    path = directory / METADATA
    known = _read_pickle(path)
    if not isinstance(known, metadata.Metadata):
        raise IntegrityFailure(
            f"{path} is not the metadata of a distributed checkpoint: copy or save it again"
        )
    try:
        for index, info in known.storage_data.items():
            if not re.fullmatch(r"\w[\w.-]*", info.relative_path):
                raise ValueError(
                    f"{index.fqn} lies at {info.relative_path!r}, which is not a plain name of a"
                    " file in the directory"
                )
        tensors = {}
        for name, tensor in known.state_dict_metadata.items():
            if isinstance(tensor, metadata.TensorStorageMetadata) and not OPTIMIZER.fullmatch(name):
                pairs = [(tuple(chunk.offsets), chunk.sizes) for chunk in tensor.chunks]
                boxes = [
                    (start, tuple(map(sum, zip(start, sizes, strict=False))))
                    for start, sizes in pairs
                ]
                check_cover(f"tensor {name!r} in {directory}", boxes, tuple(tensor.size))
                tensors[name] = torch.empty(tensor.size, dtype=tensor.properties.dtype)
        with warnings.catch_warnings(action="ignore"):  # of a process that is not a rank
            distributed.load(dict(tensors), storage_reader=_Reader(directory, known), no_dist=True)
    except IntegrityFailure:
        raise
    except (
        Exception,
        distributed.CheckpointException,
    ) as error:  # a damaged file makes torch raise nearly anything
        cause = (
            error.failures[0][0] if isinstance(error, distributed.CheckpointException) else error
        )
        raise IntegrityFailure(
            f"{directory} cannot be read, so copy or save it again: {_first_line(cause)}"
        ) from error
    common = read_torch_file(directory / COMMON) if (directory / COMMON).is_file() else {}
    common = (
        {key: common[key] for key in ("args", "iteration") if key in common}
        if isinstance(common, dict)
        else {}
    )
    single: dict[str, torch.Tensor] = {}
    for name, whole in tensors.items():
        if match := STACKED.fullmatch(name):
            single |= {
                f"{match[1]}.{number}.{match[2]}": layer for number, layer in enumerate(whole)
            }
        else:
            single[name] = whole
    return {"model": single, "checkpoint_version": 3, **common}


def files_of(directory: Path) -> list[Path]:
    """Return a list of the paths of a distributed checkpoint's files that exist: metadata, common
    values, then shards by name. Empty for a directory of another kind."""
    named = [path for path in (directory / METADATA, directory / COMMON) if path.is_file()]
    return [*named, *sorted(directory.glob("*.distcp"))]
