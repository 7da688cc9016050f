"""Loops compiled by numba, once per machine: the machine code is cached on disk, and later
processes load it."""

import fcntl
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numba
from numba.core import config as _config

from mlm_repro.lineage.environment import user_cache

Kernel = Callable[..., Any]
config: Any = _config
BLAS = "scipy.linalg.cython_blas"


def _load_arrays_without_blas() -> None:
    """Import numba's module of array functions without scipy's BLAS: no kernel multiplies matrices,
    and scipy loads slowly. Does nothing if scipy's BLAS is imported already."""
    if BLAS not in sys.modules:
        sys.modules[BLAS] = None  # type: ignore[assignment]
        try:
            import_module("numba.np.arraymath")
        finally:
            del sys.modules[BLAS]


_load_arrays_without_blas()


def compiled(function: Kernel, **options: Any) -> Kernel:
    """Return the Python function `function`, wrapped by numba to be compiled at its first call.
    `options` are numba.njit's; by default float operations happen as written.

    The machine code is cached in `NUMBA_CACHE_DIR` or, if that is not set, in this user's cache,
    not beside the source, where an uninstall would leave it. If that folder cannot be made, each
    process compiles for itself; if it is there and cannot be written, numba takes a place of its
    own, which may be beside the source.
    """
    chosen = config.CACHE_DIR
    try:
        folder = Path(chosen) if chosen else user_cache("kernels")
        folder.mkdir(parents=True, exist_ok=True)
        # numba reads its setting when it wraps a function; it is set back for others' functions.
        config.CACHE_DIR = str(folder)
        return numba.njit(cache=True, **options)(function)
    except (OSError, RuntimeError):  # RuntimeError: this user has no home
        return numba.njit(**options)(function)
    finally:
        config.CACHE_DIR = chosen


def call_first(kernel: Kernel, *arguments: object) -> Any:
    """Call `kernel`, a function that numba compiles, on `arguments` and return its result, under a
    lock on the kernel's cache folder until the kernel returns. Of several processes that start
    together one compiles, and the others wait to load its machine code. Without a folder that can
    be locked the kernel is called all the same. Only for a short first call: calls in other
    processes wait for it."""
    folder = -1
    with suppress(OSError, AttributeError, TypeError):
        folder = os.open(kernel.stats.cache_path, os.O_RDONLY)  # type: ignore[attr-defined]
        fcntl.flock(folder, fcntl.LOCK_EX)
    try:
        return kernel(*arguments)
    finally:
        if folder >= 0:
            os.close(folder)
