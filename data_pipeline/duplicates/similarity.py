"""Exact Jaccard similarity of texts over their character shingles, compiled.

The shingles of one text go into a hash table; those of the other are looked up in it. A key of up to eight bytes is
the shingle itself (`shingles.pack`); longer shingles are compared byte by byte, so no two shingles are confused.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_pipeline.fast.kernels import compiled
from data_pipeline.fast.shingles import CHUNK, EMPTY, as_bytes, first_end, pack

LARGEST_FIRST_TABLE = 1 << 20
CACHE_BYTES = 1 << 28


class ShingleTable(NamedTuple):
    """The distinct shingles of a text by hash slot: at most 64 bytes for each byte of text, 43 of a long one."""

    keys: NDArray[np.uint64]
    """EMPTY where there is no shingle."""
    starts: NDArray[np.int64]
    """Byte at which the shingle starts in the text."""
    size: int
    """Number of distinct shingles; 0 for a text shorter than a shingle."""
    data: NDArray[np.uint8]
    """The text in UTF-8."""
    characters: int


def tabulate(data: NDArray[np.uint8], characters: int) -> ShingleTable:
    """The table of a text's shingles."""
    keys, starts, size = _tabulate(data, characters)
    return ShingleTable(keys, starts, size, data, characters)


def similarity(table: ShingleTable, other: NDArray[np.uint8]) -> float:
    """Jaccard similarity of two texts' shingles, equal to `shingles.jaccard` to the last bit."""
    shared, added = _compare(table.keys, table.starts, table.data, other, table.characters)
    union = table.size + added
    return float(shared / union) if union else float(np.array_equal(table.data, other))


class ShingledTexts:
    """Texts by number, read with `text_of`; the last used are remembered up to `cache_bytes` of text."""

    def __init__(self, text_of: Callable[[int], str], characters: int, cache_bytes: int = CACHE_BYTES) -> None:
        self._text_of, self._characters = text_of, characters
        self._cached: OrderedDict[int, NDArray[np.uint8]] = OrderedDict()
        self._free_bytes = cache_bytes

    def similarities(self, number: int, others: Sequence[int]) -> Iterator[tuple[int, float]]:
        """Similarity of this text to each of the others, with their numbers. Nothing is read if there are no others."""
        table: ShingleTable | None = None
        for other in others:
            data = self[other]
            if np.array_equal(self[number], data):
                yield other, 1.0
            else:
                table = table or tabulate(self[number], self._characters)
                yield other, similarity(table, data)

    def has_shingles(self, number: int) -> bool:
        """True if the text is at least one shingle long."""
        return bool(first_end(self[number], self._characters) <= self[number].size)

    def __getitem__(self, number: int) -> NDArray[np.uint8]:
        """The text in UTF-8."""
        if number in self._cached:
            self._cached.move_to_end(number)
            return self._cached[number]
        data = self._cached[number] = as_bytes(self._text_of(number))
        self._free_bytes -= data.size
        while self._free_bytes < 0 and len(self._cached) > 1:
            self._free_bytes += self._cached.popitem(last=False)[1].size
        return data


@compiled
def _slot(key: np.uint64, mask: int) -> np.int64:
    mixed = key * np.uint64(0x9E3779B97F4A7C15)
    return np.int64(mixed ^ (mixed >> np.uint64(32))) & mask


@compiled
def _same(data: NDArray[np.uint8], start: int, other: NDArray[np.uint8], other_start: int, length: int) -> bool:
    """True if `length` bytes, at most those of one shingle of `other`, are equal in both."""
    if start + length > data.shape[0]:
        return False
    same = True
    for place in range(length):
        same &= data[start + place] == other[other_start + place]
    return same


@compiled
def _empty_table(bytes_of_text: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    capacity = 64
    while capacity < 2 * bytes_of_text and capacity < LARGEST_FIRST_TABLE:
        capacity *= 2
    return np.full(capacity, EMPTY), np.empty(capacity, np.int64)


@compiled
def _tabulate(data: NDArray[np.uint8], characters: int) -> tuple[NDArray[np.uint64], NDArray[np.int64], int]:
    table, places = _empty_table(data.shape[0])
    size = 0
    keys, starts, ends = np.empty(CHUNK, np.uint64), np.empty(CHUNK, np.int64), np.empty(CHUNK, np.int64)
    start, end = 0, first_end(data, characters)
    while end <= data.shape[0]:
        count, start, end = pack(data, start, end, keys, starts, ends)
        mask = table.shape[0] - 1
        for number in range(count):
            key, length = keys[number], ends[number] - starts[number]
            slot = _slot(key, mask)
            while table[slot] != EMPTY:
                if table[slot] == key and (length <= 8 or _same(data, places[slot], data, starts[number], length)):
                    break
                slot = (slot + 1) & mask
            if table[slot] == EMPTY:
                table[slot] = key
                places[slot] = starts[number]
                size += 1
        if 4 * (size + CHUNK) > 3 * table.shape[0] and end <= data.shape[0]:
            table, places = _doubled(table, places)
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
def _compare(
    table: NDArray[np.uint64],
    places: NDArray[np.int64],
    data: NDArray[np.uint8],
    other: NDArray[np.uint8],
    characters: int,
) -> tuple[int, int]:
    """Number of distinct shingles of `other` that are in the table of `data`, and number that are not."""
    met = np.zeros(table.shape[0], np.bool_)
    new, new_places = _empty_table(other.shape[0] // 8)
    keys, starts, ends = np.empty(CHUNK, np.uint64), np.empty(CHUNK, np.int64), np.empty(CHUNK, np.int64)
    shared = added = 0
    start, end = 0, first_end(other, characters)
    while end <= other.shape[0]:
        while 4 * (added + CHUNK) > 3 * new.shape[0]:
            new, new_places = _doubled(new, new_places)
        count, start, end = pack(other, start, end, keys, starts, ends)
        mask, new_mask = table.shape[0] - 1, new.shape[0] - 1
        for number in range(count):
            key, length = keys[number], ends[number] - starts[number]
            slot = _slot(key, mask)
            while table[slot] != EMPTY:
                if table[slot] == key and (length <= 8 or _same(data, places[slot], other, starts[number], length)):
                    shared += not met[slot]
                    met[slot] = True
                    break
                slot = (slot + 1) & mask
            if table[slot] != EMPTY:
                continue
            slot = _slot(key, new_mask)
            while new[slot] != EMPTY:
                if new[slot] == key and (length <= 8 or _same(other, new_places[slot], other, starts[number], length)):
                    break
                slot = (slot + 1) & new_mask
            if new[slot] == EMPTY:
                new[slot] = key
                new_places[slot] = starts[number]
                added += 1
    return shared, added
