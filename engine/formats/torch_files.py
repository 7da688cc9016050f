"""PyTorch's own files (pickled), read through its restricted unpickler with a stated list of further names.

Nothing that a file names is imported or called: `torch.load(weights_only=True)` builds tensors and plain containers,
`argparse.Namespace` holds the arguments, and each name in `UNREAD` becomes an empty object that keeps nothing. What a
file asks for within these bounds can still be endless; so it is first read in a process of its own, which the system
ends when it takes more memory or time than a file of that size needs.
"""

import argparse
import os
import pickle
import re
import resource
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from textwrap import shorten
from typing import Any, NoReturn, Self

import torch

from lineage.errors import IntegrityFailure

UNREAD = (
    # Random state of numpy, before and since numpy 2
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "numpy.ndarray",
    "numpy.dtype",
    # Loss scalers that were pickled whole (2019 and Megatron-LM v1.0)
    "fp16.loss_scaler.LossScaler",
    "fp16.loss_scaler.DynamicLossScaler",
    "megatron.fp16.loss_scaler.LossScaler",
    "megatron.fp16.loss_scaler.DynamicLossScaler",
    # Values of arguments
    "megatron.enums.ModelType",
    "megatron.model.enums.ModelType",
    "megatron.core.enums.ModelType",
    "megatron.core.transformer.enums.AttnBackend",
    "signal.Signals",
    # Transformer Engine's `_extra_state`
    "_io.BytesIO",
)
"""Names in Megatron-LM checkpoints whose objects no model needs."""


class Unread:
    """Stands where a file had an object of a class in `UNREAD`."""

    def __new__(cls, *_: Any) -> Self:
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


SPARE_BYTES, SPARE_SECONDS, BYTES_PER_SECOND = 1 << 30, 10, 20 << 20
"""What reading a file may take beside four times its size, and how fast it is at least."""

Name = Callable[..., Any] | tuple[Callable[..., Any], str]


@contextmanager
def only(names: list[Name]) -> Iterator[None]:
    """Files may name these; what other libraries have allowed in this process is put aside meanwhile."""
    others = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        torch.serialization.add_safe_globals(names)
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(others)


def read_torch_file(path: Path) -> Any:
    """The content of a file that `torch.save` wrote, in today's zip format or the one before torch 1.6, on the CPU.

    Raises IntegrityFailure for a file that is damaged, or that names a function or class outside the list; that
    function is not run.
    """
    names: list[Name] = [argparse.Namespace]
    names += [(Unread, name) for name in UNREAD]

    def read() -> Any:
        try:
            if zipped := zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                        raise ValueError("it is compressed, which PyTorch's files are not")
            with only(names):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
        except Exception as error:  # a damaged file makes torch raise nearly anything
            if match := re.search(r"GLOBAL (\S+?)[,.;:]?(?:\s|$)", str(error)):
                raise _refused(path, match[1] if "." in match[1] else f"builtins.{match[1]}") from error
            raise IntegrityFailure(f"{path} cannot be read as a PyTorch file: {first_line(error)}") from error

    return _tried(read, path)


def read_pickle(path: Path, known: Mapping[str, Any], unread: re.Pattern[str]) -> Any:
    """The content of a pickled file that names nothing but `known`; what is `unread` becomes objects that keep nothing.

    Raises as `read_torch_file` does.
    """

    class Restricted(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            full = f"{module}.{name}"
            if full in known:
                return known[full]
            if unread.fullmatch(full):
                return Unread
            raise _refused(path, full)

    def read() -> Any:
        try:
            with path.open("rb") as file:
                return Restricted(file).load()
        except IntegrityFailure:
            raise
        except Exception as error:  # a damaged file makes pickle raise nearly anything
            raise IntegrityFailure(f"{path} cannot be read: {first_line(error)}") from error

    return _tried(read, path)


def _tried(read: Callable[[], Any], path: Path) -> Any:
    """What `read` returns, after another process has shown that it ends within what the file's size allows."""
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_try, args=(read, path, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        said = ours.recv()
    except EOFError:
        said = f"{path} takes more memory or time than reading a file of its size does"
    finally:
        process.kill()
        process.join()
    if said:
        raise IntegrityFailure(said)
    return read()


def _try(read: Callable[[], Any], path: Path, pipe: Connection) -> NoReturn:
    size, said = path.stat().st_size if path.exists() else 0, ""
    seconds = SPARE_SECONDS + size // BYTES_PER_SECOND
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    taken = Path("/proc/self/statm")
    if taken.exists():
        pages = int(taken.read_text(encoding="ascii").split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + SPARE_BYTES + 4 * size,) * 2)
    try:
        read()
    except IntegrityFailure as error:
        said = str(error)
    pipe.send(said)
    os._exit(0)


def _refused(path: Path, name: str) -> IntegrityFailure:
    return IntegrityFailure(f"{path} asks to call {name}, which no checkpoint needs: nothing in it was run")


def first_line(error: BaseException) -> str:
    """What an error says, in one line that ends at a word, without torch's advice to load what is not safe."""
    said = str(error).rpartition("WeightsUnpickler error: ")[2].strip() or type(error).__name__
    return shorten(said.splitlines()[0], 200, placeholder=" …")
