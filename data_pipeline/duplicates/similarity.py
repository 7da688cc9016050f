"""Jaccard similarity of texts over their character shingles.

Each text is turned into the sorted keys of its distinct shingles. A key of up to eight bytes is the shingle itself
(`shingles.pack`). A longer shingle has a hash of 56 bits, so about one comparison in ten million of two long texts
could count a shingle too many.
"""

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from data_pipeline.fast.kernels import compiled
from data_pipeline.fast.shingles import CHUNK, as_bytes, first_end, pack

CACHE_BYTES = 1 << 29
WHOLE = np.uint64(0xFF << 56)
"""The lowest key of a text that is shorter than a shingle; all others are below."""

Keys = NDArray[np.uint64]


def shingle_keys(text: str, characters: int) -> Keys:
    """Keys of the distinct shingles of a text, ascending; a shorter text is its own only shingle."""
    data = as_bytes(text)
    if len(text) >= characters:
        return np.unique(_keys(data, characters))
    return WHOLE | np.frombuffer(blake2b(data.tobytes(), digest_size=7).digest() + b"\0", "<u8")


def similarity(left: Keys, right: Keys) -> float:
    """Shared keys over all keys."""
    shared = _shared(left, right)
    return float(shared / (len(left) + len(right) - shared))


class ShingledTexts:
    """Texts by number, read with `text_of`; the keys of those last used are remembered up to `cache_bytes`."""

    def __init__(self, text_of: Callable[[int], str], characters: int, cache_bytes: int = CACHE_BYTES) -> None:
        self._text_of, self._characters = text_of, characters
        self._cached: OrderedDict[int, Keys] = OrderedDict()
        self._free_bytes = cache_bytes

    def similarity(self, left: int, right: int) -> float:
        """Similarity of two texts."""
        return similarity(self[left], self[right])

    def has_shingles(self, number: int) -> bool:
        """True if the text is at least one shingle long."""
        return bool(self[number][0] < WHOLE)

    def __getitem__(self, number: int) -> Keys:
        """The keys of a text."""
        if number in self._cached:
            self._cached.move_to_end(number)
            return self._cached[number]
        keys = self._cached[number] = shingle_keys(self._text_of(number), self._characters)
        self._free_bytes -= keys.nbytes
        while self._free_bytes < 0 and len(self._cached) > 1:
            self._free_bytes += self._cached.popitem(last=False)[1].nbytes
        return keys


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
def _shared(left: Keys, right: Keys) -> int:
    shared = own = other = 0
    while own < left.shape[0] and other < right.shape[0]:
        first, second = left[own], right[other]
        shared += first == second
        own += first <= second
        other += second <= first
    return shared
