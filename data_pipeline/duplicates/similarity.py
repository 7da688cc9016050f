"""The exact Jaccard similarity of texts, computed on the keys of their shingles.

A key of up to eight bytes is the shingle itself (`shingles.pack`). A longer shingle has a hash of
56 bits, so about one comparison in ten million of two long texts could count a shingle too many.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from mlm_repro.data_pipeline.fast.shingles import CHUNK, as_bytes, first_end, pack
from mlm_repro.lineage.loops import compiled

MOST_REMEMBERED = 1 << 23
"""Largest number of cached keys, of eight bytes each: enough for the 4,096 documents that a bucket
offers, of two thousand characters each."""
WHOLE = np.uint64(0xFF << 56)
"""The lowest key of a text that is shorter than a shingle; keys of shingles are lower."""

Keys = NDArray[np.uint64]


def shingle_keys(text: str, characters: int) -> Keys:
    """Return the keys of the distinct shingles of a text, ascending. A text that is shorter than a
    shingle is its own only shingle."""
    data = as_bytes(text)
    if len(text) >= characters:
        keys = np.sort(_keys(data, characters))
        return keys[np.diff(keys, prepend=~keys[0]) != 0]
    return WHOLE | np.frombuffer(blake2b(data.tobytes(), digest_size=7).digest() + b"\0", "<u8")


@compiled
def _keys(data: NDArray[np.uint8], characters: int) -> Keys:
    """Return the keys of all shingles of a text in UTF-8, in order, repetitions included."""
    all_keys = np.empty(data.shape[0], np.uint64)
    keys = np.empty(CHUNK, np.uint64)
    starts = np.empty(CHUNK, np.int64)
    ends = np.empty(CHUNK, np.int64)
    filled = 0
    start = 0
    end = first_end(data, characters)
    while end <= data.shape[0]:
        count, start, end = pack(data, start, end, keys, starts, ends)
        all_keys[filled : filled + count] = keys[:count]
        filled += count
    return all_keys[:filled]


@compiled
def count_shared(left: Keys, right: Keys) -> int:
    """Return the number of keys that two ascending arrays share. No step depends on a branch, which
    a processor could not predict."""
    shared, index, other_index = 0, 0, 0
    while index < left.shape[0] and other_index < right.shape[0]:
        key, theirs = left[index], right[other_index]
        shared += key == theirs
        index += key <= theirs
        other_index += theirs <= key
    return shared


class ShingledTexts:
    """Texts by number, read with `text_of` and cached as their keys. At `most` keys the cache is
    emptied."""

    def __init__(
        self, text_of: Callable[[int], str], characters: int, most: int = MOST_REMEMBERED
    ) -> None:
        self._text_of, self._characters, self._most = text_of, characters, most
        self._known, self._held = dict[int, Keys](), 0

    def _keys(self, number: int) -> Keys:
        if number not in self._known:
            keys = shingle_keys(self._text_of(number), self._characters)
            self._held += len(keys)
            if self._held > self._most:
                self._known.clear()
                self._held = len(keys)
            self._known[number] = keys
        return self._known[number]

    def similarities(
        self, number: int, others: Sequence[int], enough: float
    ) -> NDArray[np.float64]:
        """Return the Jaccard similarity of a text to each of `others`, up to and with the first
        that is at least `enough`."""
        own, similar = self._keys(number), list[float]()
        for other in others:
            theirs = self._keys(other)
            shared = count_shared(own, theirs)
            similar.append(shared / (len(own) + len(theirs) - shared))
            if similar[-1] >= enough:
                break
        return np.array(similar)
