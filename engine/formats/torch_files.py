"""Pickled files of PyTorch, read with `torch.load(weights_only=True)`, which runs nothing that a file names."""

import argparse
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any, Self

import torch

from lineage.errors import IntegrityFailure

UNREAD = (
    "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype",
    "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar",
    "fp16.loss_scaler.LossScaler", "fp16.loss_scaler.DynamicLossScaler",
    "megatron.fp16.loss_scaler.LossScaler", "megatron.fp16.loss_scaler.DynamicLossScaler",
    "megatron.enums.ModelType", "megatron.model.enums.ModelType", "megatron.core.enums.ModelType",
    "megatron.core.transformer.enums.AttnBackend", "signal.Signals", "_io.BytesIO",
)  # fmt: skip
"""Classes and functions in Megatron-LM checkpoints that no model needs. Each call gives an `Unread`.

They are random state of numpy before and since version 2, loss scalers that were pickled whole (2019 and v1.0), values
of arguments, and Transformer Engine's `_extra_state`.
"""


class Unread:
    """An object of a class in `UNREAD`, without its content."""

    def __new__(cls, *_: Any) -> Self:
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


def read_torch_file(path: Path) -> Any:
    """Read a file that `torch.save` wrote, in the zip format or the one before torch 1.6, to the CPU.

    Raises IntegrityFailure if the file is damaged or names a function or class outside the list.
    """
    names: list[Any] = [argparse.Namespace, *((Unread, name) for name in UNREAD)]
    try:
        if is_zip := zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                    raise ValueError("it is compressed, so it was not written by torch.save")
        with _allowed(names):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # a damaged file makes torch raise nearly anything
        if match := re.search(r"GLOBAL (\S+?)[,.;:]?(?:\s|$)", str(error)):
            raise _refused(path, match[1] if "." in match[1] else f"builtins.{match[1]}") from error
        raise IntegrityFailure(f"{path} cannot be read as a PyTorch file: {first_line(error)}") from error


@contextmanager
def _allowed(names: list[Any]) -> Iterator[None]:
    """Context manager: files may name these and nothing that other libraries in this process allow."""
    others = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals(names):
            yield
    finally:
        torch.serialization.add_safe_globals(others)


def read_pickle(path: Path, known: Mapping[str, Any], unread: re.Pattern[str]) -> Any:
    """Read a pickle that names nothing but `known`. Names that match `unread` become `Unread`.

    Raises IntegrityFailure if the file is damaged or names anything else.
    """

    class Restricted(pickle._Unpickler):  # the one in C makes room for any number that a damaged file holds
        def find_class(self, module: str, name: str) -> Any:
            full = f"{module}.{name}"
            if full not in known and not unread.fullmatch(full):
                raise _refused(path, full)
            return known.get(full, Unread)

    try:
        with path.open("rb") as file:
            return Restricted(file).load()
    except IntegrityFailure:
        raise
    except Exception as error:  # a damaged file makes pickle raise nearly anything
        raise IntegrityFailure(f"{path} cannot be read: {first_line(error)}") from error


def _refused(path: Path, name: str) -> IntegrityFailure:
    return IntegrityFailure(f"{path} asks to call {name}, which no checkpoint needs: nothing in it was run")


def first_line(error: BaseException) -> str:
    """The first line of an error, cut at a word, without torch's advice to load unsafely."""
    message = str(error).rpartition("WeightsUnpickler error: ")[2].strip() or type(error).__name__
    return shorten(message.splitlines()[0], 200, placeholder=" …")
