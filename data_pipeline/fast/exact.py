"""Checks a fast function against its reference on samples at first use, and falls back to the
reference if they differ."""

import io
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from operator import eq
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mlm_repro.lineage.remembered import digest_of, recall, remember

LAST_LETTER = 0x1FFFF
"""Last code point that can be an upper-case letter or a mark; all later ones are ideographs, tags
or private."""
Arrays = dict[str, NDArray[Any]]
T = TypeVar("T")
R = TypeVar("R")


def checked(
    name: str,
    fast: Callable[[], Callable[[T], R]],
    reference: Callable[[T], R],
    samples: Iterable[T],
    same: Callable[[R, R], bool] = eq,
) -> Callable[[T], R]:
    """Return the function that `fast()` makes if it agrees with `reference` on every sample, else
    `reference`, also if an error is raised meanwhile. Both functions take one argument, and each
    of the `samples` is one; the function `same`, by default `==`, compares two results.

    A rejected function is announced on standard error, by its `name`; results are the same either
    way.
    """
    try:
        candidate = fast()
        differing = next(
            (sample for sample in samples if not same(candidate(sample), reference(sample))), None
        )
    except Exception as error:
        reason = f"failed with {type(error).__name__}: {error}"
    else:
        if differing is None:
            return candidate
        reason = f"differs on {differing!r:.80}"
    print(
        f"warning: the fast {name} {reason}; its slower reference is used, with the same results",
        file=sys.stderr,
    )
    return reference


def checked_with_tables(
    name: str,
    tables: tuple[str, str],
    make: Callable[[], Arrays],
    fast: Callable[[Arrays], Callable[[T], R]],
    reference: Callable[[T], R],
    samples: Iterable[T],
    same: Callable[[R, R], bool] = eq,
) -> Callable[[T], R]:
    """Return the function that `fast` builds from the arrays by name that `make` returns; but
    `reference` if `make`, `fast` or that function fails, or if that function differs from it, by
    `same`, by default `==`, on one of `samples`, which is announced on standard error with `name`.
    The arrays of an accepted function are cached on disk: later processes do not call `make`, and
    compare no samples.

    `tables` is the name of the cached file without its ending, and the library's name. The cache is
    used as long as the library's files, the files beside this one, Python, numpy, the compiler and
    the processor are the same.
    """
    import numba
    from llvmlite import binding  # type: ignore[import-untyped]

    file = f"{tables[0]}.npz"
    library = find_spec(tables[1])
    folders = [Path(__file__).parent, Path(str(library and library.origin)).parent]
    processor = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    made_of = digest_of(
        *folders, facts=(np.__version__, numba.__version__, binding.llvm_version_info, processor)
    )
    content = recall(file, made_of)
    arrays = dict(np.load(io.BytesIO(content))) if content else {}

    def with_arrays() -> Callable[[T], R]:
        arrays.update({} if content else make())
        return fast(arrays)

    chosen = checked(name, with_arrays, reference, () if content else samples, same)
    if chosen is not reference and not content:
        written = io.BytesIO()
        np.savez(written, allow_pickle=False, **arrays)
        remember(file, made_of, written.getvalue())
    return chosen
