"""Exact Jaccard similarity of texts over their character shingles, compiled.

The shingles of one text are put in a hash table, those of the other are looked up in it. A key decides by itself
where it is the shingle (`shingles.pack`); longer shingles are compared byte by byte. No two shingles are confused.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_pipeline.duplicates.shingles import CHUNK, EMPTY, as_bytes, first_end, pack
from data_pipeline.kernels import compiled

LARGEST_FIRST_TABLE = 1 << 20
CACHE_BYTES = 1 << 28


class ShingledText(NamedTuple):
    """A text in UTF-8 and the number of its distinct shingles: none if it is shorter than a shingle."""

    data: NDArray[np.uint8]
    size: int


class ShingleTable(NamedTuple):
    """The distinct shingles of a text by hash slot: at most 43 bytes for each byte of text, fewer where they repeat."""

    keys: NDArray[np.uint64]
    """EMPTY where there is no shingle."""
    starts: NDArray[np.int64]
    """Where in the text the shingle starts."""
    text: ShingledText
    characters: int


def tabulate(text: str, characters: int) -> ShingleTable:
    """The table of a text's shingles."""
    data = as_bytes(text)
    keys, starts, size = _tabulate(data, characters)
    return ShingleTable(keys, starts, ShingledText(data, size), characters)


def similarity(table: ShingleTable, other: ShingledText) -> float:
    """Jaccard similarity of two texts' shingles, equal to `shingles.jaccard` to the last bit."""
    text = table.text
    if np.array_equal(text.data, other.data):
        return 1.0
    shared = _count_shared(table.keys, table.starts, text.data, other.data, table.characters)
    union = text.size + other.size - shared
    return float(shared / union) if union else 0.0


class ShingledTexts:
    """Texts by number, read with `text_of`, of which the last used are remembered up to `cache_bytes` of text."""

    def __init__(self, text_of: Callable[[int], str], characters: int, cache_bytes: int = CACHE_BYTES) -> None:
        self._text_of, self._characters = text_of, characters
        self._cached: OrderedDict[int, ShingledText] = OrderedDict()
        self._free_bytes = cache_bytes

    def similarities(self, number: int, others: Sequence[int]) -> Iterator[tuple[int, float]]:
        """Each of the other texts' numbers with its similarity to this one; without others nothing is read."""
        if others:
            table = self._table(number)
            for other in others:
                yield other, similarity(table, self[other])

    def __getitem__(self, number: int) -> ShingledText:
        if number not in self._cached:
            return self._table(number).text
        self._cached.move_to_end(number)
        return self._cached[number]

    def _table(self, number: int) -> ShingleTable:
        table = tabulate(self._text_of(number), self._characters)
        self._free_bytes += self._cached.pop(number).data.size if number in self._cached else 0
        self._cached[number] = table.text
        self._free_bytes -= table.text.data.size
        while self._free_bytes < 0 and len(self._cached) > 1:
            self._free_bytes += self._cached.popitem(last=False)[1].data.size
        return table


@compiled
def _slot(key: np.uint64, mask: int) -> np.int64:
    mixed = key * np.uint64(0x9E3779B97F4A7C15)
    return np.int64(mixed ^ (mixed >> np.uint64(32))) & mask


@compiled
def _same(data: NDArray[np.uint8], start: int, other: NDArray[np.uint8], other_start: int, length: int) -> bool:
    """Whether `length` bytes, at most those of one shingle of `other`, are equal in both."""
    if start + length > data.shape[0]:
        return False
    same = True
    for place in range(length):
        same &= data[start + place] == other[other_start + place]
    return same


@compiled
def _tabulate(data: NDArray[np.uint8], characters: int) -> tuple[NDArray[np.uint64], NDArray[np.int64], int]:
    capacity = 64
    while 3 * capacity < 4 * data.shape[0] and capacity < LARGEST_FIRST_TABLE:
        capacity *= 2
    table, places, size = np.full(capacity, EMPTY), np.empty(capacity, np.int64), 0
    keys, starts, ends = np.empty(CHUNK, np.uint64), np.empty(CHUNK, np.int64), np.empty(CHUNK, np.int64)
    start, end = 0, first_end(data, characters)
    while end <= data.shape[0]:
        count, start, end = pack(data, start, end, keys, starts, ends)
        for number in range(count):
            key, length = keys[number], ends[number] - starts[number]
            slot = _slot(key, capacity - 1)
            while table[slot] != EMPTY:
                if table[slot] == key and (length <= 8 or _same(data, places[slot], data, starts[number], length)):
                    break
                slot = (slot + 1) & (capacity - 1)
            if table[slot] == EMPTY:
                table[slot] = key
                places[slot] = starts[number]
                size += 1
        if 4 * (size + CHUNK) > 3 * capacity and end <= data.shape[0]:
            table, places = _doubled(table, places)
            capacity *= 2
    return table, places, size


@compiled
def _doubled(table: NDArray[np.uint64], places: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    capacity = 2 * table.shape[0]
    larger, larger_places = np.full(capacity, EMPTY), np.empty(capacity, np.int64)
    for old in range(table.shape[0]):
        if table[old] != EMPTY:
            slot = _slot(table[old], capacity - 1)
            while larger[slot] != EMPTY:
                slot = (slot + 1) & (capacity - 1)
            larger[slot] = table[old]
            larger_places[slot] = places[old]
    return larger, larger_places


@compiled
def _count_shared(
    table: NDArray[np.uint64],
    places: NDArray[np.int64],
    data: NDArray[np.uint8],
    other: NDArray[np.uint8],
    characters: int,
) -> int:
    """How many distinct shingles of `other` are in the table of `data`."""
    met = np.zeros(table.shape[0], np.bool_)
    keys, starts, ends = np.empty(CHUNK, np.uint64), np.empty(CHUNK, np.int64), np.empty(CHUNK, np.int64)
    shared, mask = 0, table.shape[0] - 1
    start, end = 0, first_end(other, characters)
    while end <= other.shape[0]:
        count, start, end = pack(other, start, end, keys, starts, ends)
        for number in range(count):
            key, length = keys[number], ends[number] - starts[number]
            slot = _slot(key, mask)
            while table[slot] != EMPTY:
                if table[slot] == key and (length <= 8 or _same(data, places[slot], other, starts[number], length)):
                    if not met[slot]:
                        met[slot] = True
                        shared += 1
                    break
                slot = (slot + 1) & mask
    return shared
