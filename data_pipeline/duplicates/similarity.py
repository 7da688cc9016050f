"""The exact Jaccard similarity of texts: that of their sets of shingles, as keys.

A key of up to eight bytes is the shingle itself (`shingles.pack`). A longer shingle has a hash of 56 bits, so about one
comparison in ten million of two long texts could count a shingle too many.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from mlm_repro.data_pipeline.fast.shingles import CHUNK, as_bytes, first_end, pack
from mlm_repro.lineage.loops import compiled

MOST_REMEMBERED, FEWEST_SLOTS, MOST_SLOTS = 1 << 26, 1 << 15, 1 << 22
SPREAD, HALF, ONE = np.uint64(0x9E3779B97F4A7C15), np.uint64(32), np.uint64(1)
WHOLE = np.uint64(0xFF << 56)
"""The lowest key of a text that is shorter than a shingle; all others are below."""

Keys = NDArray[np.uint64]


def shingle_keys(text: str, characters: int) -> Keys:
    """Keys of the distinct shingles of a text, ascending; a shorter text is its own only shingle."""
    data = as_bytes(text)
    if len(text) >= characters:
        every = np.sort(_keys(data, characters))
        return every[np.diff(every, prepend=~every[0]) != 0]
    return WHOLE | np.frombuffer(blake2b(data.tobytes(), digest_size=7).digest() + b"\0", "<u8")


@compiled
def _keys(data: NDArray[np.uint8], characters: int) -> Keys:
    every = np.empty(data.shape[0], np.uint64)
    keys, starts, ends = np.empty(CHUNK, np.uint64), np.empty(CHUNK, np.int64), np.empty(CHUNK, np.int64)
    filled, start, end = 0, 0, first_end(data, characters)
    while end <= data.shape[0]:
        count, start, end = pack(data, start, end, keys, starts, ends)
        every[filled : filled + count] = keys[:count]
        filled += count
    return every[:filled]


@compiled
def number_keys(keys: Keys, table: Keys, numbers: NDArray[np.int32], count: int) -> tuple[NDArray[np.int32], int]:
    """The number of each key; a key that is not in the table of `count` keys and their numbers is added to it.

    Returns also how many it then has. The table has open addressing and holds the complements, of which none is 0.
    """
    numbered, last = np.empty(keys.shape[0], np.int32), np.uint64(table.shape[0] - 1)
    for place in range(keys.shape[0]):
        key = ~keys[place]
        slot = ((key * SPREAD) >> HALF) & last
        while table[slot] != 0 and table[slot] != key:
            slot = (slot + ONE) & last
        if table[slot] == 0:
            table[slot], numbers[slot] = key, count
            count += 1
        numbered[place] = numbers[slot]
    return numbered, count


@compiled
def count_marked(marks: NDArray[np.uint8], numbers: NDArray[np.int32]) -> int:
    """How many of the numbers are marked."""
    marked = 0
    for number in numbers:
        marked += marks[number]
    return marked


class ShingledTexts:
    """Texts by number, read with `text_of`. Each key has a number of its own, and texts are remembered as these.

    All is forgotten where there is no room: beyond `most` numbers of texts, or half the slots of distinct keys.
    """

    def __init__(self, text_of: Callable[[int], str], characters: int, most: int = MOST_REMEMBERED) -> None:
        self._text_of, self._characters, self._most, self._longest = text_of, characters, most, 0
        self._size = FEWEST_SLOTS
        self._forget()

    def _forget(self) -> None:
        """Begin with a larger table, up to MOST_SLOTS or what the two longest texts need."""
        self._size = min(2 * self._size, MOST_SLOTS)
        while self._size < 4 * self._longest:
            self._size *= 2
        self._table, self._numbers = np.zeros(self._size, np.uint64), np.empty(self._size, np.int32)
        self._marks, self._known = np.zeros(self._size, np.uint8), dict[int, NDArray[np.int32]]()
        self._count, self._room = 0, max(self._most, 2 * self._longest)

    def _remember(self, number: int) -> NDArray[np.int32]:
        """The numbers of the keys of a text."""
        if number not in self._known:
            keys = shingle_keys(self._text_of(number), self._characters)
            self._longest = max(self._longest, len(keys))
            if self._room < len(keys) or self._size < 2 * (self._count + len(keys)):
                self._forget()
            self._room -= len(keys)
            self._known[number], self._count = number_keys(keys, self._table, self._numbers, self._count)
        return self._known[number]

    def similarities(self, number: int, others: Sequence[int], enough: float) -> NDArray[np.float64]:
        """Shared keys over all keys of a text and each other, up to the first that is `enough`."""
        own, similar = self._remember(number), list[float]()
        self._marks[own] = 1
        for other in others:
            theirs = self._remember(other)
            if number not in self._known:
                self._marks[self._remember(number)] = 1
            shared = count_marked(self._marks, theirs)
            similar.append(shared / (len(own) + len(theirs) - shared))
            if similar[-1] >= enough:
                break
        self._marks[self._known[number]] = 0
        return np.array(similar)
