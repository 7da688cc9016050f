"""Fast paths that must give the reference's answer; a path that does not is given up at first use."""

import sys
from collections.abc import Callable, Iterable
from operator import eq
from typing import TypeVar

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
    print(f"WARNING: the fast {name} {reason}; its reference is used, which is slower", file=sys.stderr)
    return reference
