"""Fast paths that must give the reference's answer; a path that does not is given up at first use."""

import io
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from operator import eq
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lineage.remembered import digest_of, recall, remember

LAST_LETTER = 0x1FFFF
"""Last code point that can be an upper-case letter or a mark; all later ones are ideographs, tags or private."""
T = TypeVar("T")
R = TypeVar("R")


def checked(
    name: str,
    fast: Callable[[], Callable[[T], R]],
    reference: Callable[[T], R],
    samples: Iterable[T],
    same: Callable[[R, R], bool] = eq,
) -> Callable[[T], R]:
    """The fast function `fast` makes if it agrees with `reference` on every sample, else `reference`.

    Giving a fast path up is announced on standard error; the result of the work is the same either way.
    """
    try:
        candidate = fast()
        differing = next((sample for sample in samples if not same(candidate(sample), reference(sample))), None)
    except Exception as error:
        reason = f"failed with {type(error).__name__}: {error}"
    else:
        if differing is None:
            return candidate
        reason = f"differs on {differing!r:.80}"
    print(f"warning: the fast {name} {reason}; its reference is used, which is slower", file=sys.stderr)
    return reference


class Tables:
    """Arrays that a fast path was checked with on this machine: its later processes need neither library nor check.

    They count as long as the library's files, those beside this one, Python, numpy, the compiler and the processor are
    the same.
    """

    def __init__(self, name: str, library: str) -> None:
        import numba
        from llvmlite import binding  # type: ignore[import-untyped]

        places = [Path(__file__).parent, _folder(library)]
        processor = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
        self._made_of = digest_of(
            *places, facts=(np.__version__, numba.__version__, binding.llvm_version_info, processor)
        )
        self._name = f"{name}.npz"
        content = recall(self._name, self._made_of)
        self.arrays: dict[str, NDArray[Any]] = dict(np.load(io.BytesIO(content))) if content else {}
        """The arrays by name; empty where none are kept."""

    def keep(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Keep the arrays, which were checked."""
        file = io.BytesIO()
        np.savez(file, allow_pickle=False, **arrays)
        remember(self._name, self._made_of, file.getvalue())


def _folder(library: str) -> Path:
    place = find_spec(library)
    return Path(str(place and place.origin)).parent
