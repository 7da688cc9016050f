"""Compiled passes over characters and pairs of characters that tell what ftfy may do to a text.

`BADNESS_RE`, by which ftfy recognises text that was decoded wrongly, is a list of alternatives; each has two adjacent
sets of characters. Pairs that belong to none of them, all but a few, need no search.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

import numpy as np
from ftfy.badness import BADNESS_RE
from numpy.typing import NDArray

from data_pipeline.fast.kernels import call_first, compiled

LAST = 0xFFFF
"""Code point that stands for itself and all after it; ftfy's sets have none of those."""

Codes = NDArray[np.uint32]


def as_codes(text: str) -> Codes:
    """The text's code points, lone surrogates too."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


class Kinds:
    """Table of the kinds of each character. A kind is one bit; a character may be of several kinds."""

    def __init__(self, characters: Mapping[int, Iterable[str]], others: int) -> None:
        """`characters` holds the characters of each bit; `others` holds the kinds of all other characters."""
        self._kinds = np.zeros(LAST + 1, np.uint8)
        for bit, members in characters.items():
            self._kinds[[ord(character) for character in members]] |= np.uint8(bit)
        self._kinds[self._kinds == 0] = others
        call_first(_kinds_of, as_codes(""), self._kinds)

    def of(self, codes: Codes) -> int:
        """Kinds that occur in the text."""
        return int(_kinds_of(codes, self._kinds))


def badness_search(known: set[str]) -> Callable[[str, Codes], bool]:
    """A function that is true if `BADNESS_RE` matches a text without `known`, or would with other line ends.

    Raises ValueError if the expression is not made of pairs and of characters in `known`.
    """
    parsed = parse(BADNESS_RE)
    operation, argument = parsed[0]
    if str(operation) != "BRANCH" or len(parsed) > 1 or BADNESS_RE.flags != re.VERBOSE | re.UNICODE:
        raise ValueError("ftfy's BADNESS_RE is not a list of alternatives")
    alternatives = [[character_set(item) for item in alternative] for alternative in argument[1]]
    pairs = [_last_pair(each) for each in alternatives if not _is_within(each, set(map(ord, known)))]
    left, right = np.zeros((2, LAST + 1), np.uint64)
    for number, pair in enumerate(pairs):
        for table, (members, negated) in zip((left, right), pair, strict=True):
            chosen = np.full(LAST + 1, negated)
            chosen[sorted(members)] = not negated
            table[chosen] |= np.uint64(1 << number)
    width = parsed.getwidth()[1]
    search = re.compile(BADNESS_RE.pattern, BADNESS_RE.flags | re.MULTILINE).search
    call_first(_next_pair, as_codes(""), 0, left, right)

    def is_bad(text: str, codes: Codes) -> bool:
        place = _next_pair(codes, 0, left, right)
        while place < len(codes):
            if search(text, max(place - width, 0), place + width):
                return True
            place = _next_pair(codes, place, left, right)
        return False

    return is_bad


def parse(expression: re.Pattern[str]) -> Any:
    """Parse tree of a regular expression, from Python's own parser."""
    return import_module("re._parser").parse(expression.pattern, expression.flags)


Set = tuple[set[int], bool]
"""Code points, and True if all others are meant."""


def character_set(item: tuple[Any, Any]) -> Set | None:
    """Characters that a node of a parsed expression matches, if it is a set or its complement."""
    operation, argument = item
    members: set[int] = set()
    negated = False
    for kind, value in {"LITERAL": [item], "IN": argument}.get(str(operation), [(None, None)]):
        if str(kind) == "NEGATE":
            negated = True
        elif str(kind) in ("LITERAL", "RANGE"):
            low, high = (value, value) if str(kind) == "LITERAL" else value
            members.update(range(low, high + 1))
        else:
            return None
    return members, negated


def _is_within(sets: list[Set | None], known: set[int]) -> bool:
    """True if the node is one character of `known`."""
    return len(sets) == 1 and sets[0] is not None and not sets[0][1] and sets[0][0] <= known


def _last_pair(sets: list[Set | None]) -> tuple[Set, Set]:
    """The last two adjacent sets; the later characters are the ones that distinguish such text."""
    for left, right in zip(sets[-2::-1], sets[:0:-1], strict=True):
        if left and right:
            return left, right
    raise ValueError("an alternative of ftfy's BADNESS_RE has no two sets of characters side by side")


@compiled
def _kinds_of(codes: Codes, kinds: NDArray[np.uint8]) -> int:
    present = 0
    for code in codes:
        present |= int(kinds[min(code, np.uint32(LAST))])
    return present


@compiled
def _next_pair(codes: Codes, start: int, left: NDArray[np.uint64], right: NDArray[np.uint64]) -> int:
    """The place of the second of the next two characters of a pair, the first being at `start` or later."""
    before = np.uint64(0)
    for place in range(start, len(codes)):
        code = min(codes[place], np.uint32(LAST))
        if before & right[code]:
            return place
        before = left[code]
    return len(codes)
