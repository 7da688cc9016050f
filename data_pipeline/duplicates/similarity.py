"""The exact Jaccard similarity of texts, computed on the keys of their shingles.

A key of up to eight bytes is the shingle itself (`shingles.pack`). A longer shingle has a hash of
56 bits, so about one comparison in ten million of two long texts could count a shingle too many.
"""

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from mlm_repro.data_pipeline.arrays import Integers
from mlm_repro.data_pipeline.fast.shingles import CHUNK, as_bytes, first_end, pack
from mlm_repro.lineage.loops import compiled

MOST_REMEMBERED = 1 << 25
"""Largest number of cached keys, each of eight bytes: enough for 32,000 documents of a thousand
characters each."""
WHOLE = np.uint64(0xFF << 56)
"""Smallest key that stands for a whole text, one that is shorter than a shingle. Keys of shingles
are smaller."""

Keys = NDArray[np.uint64]
Span = tuple[int, int]


def shingle_keys(text: str, characters: int) -> Keys:
    """Return the keys of the distinct shingles, runs of `characters` characters, of a text,
    ascending, as uint64 [shingles]. A text that is shorter than a shingle is its own only
    shingle."""
    data = as_bytes(text)
    if len(text) >= characters:
        keys = np.sort(_keys(data, characters))
        return keys[np.diff(keys, prepend=~keys[0]) != 0]
    return WHOLE | np.frombuffer(blake2b(data.tobytes(), digest_size=7).digest() + b"\0", "<u8")


@compiled
def _keys(data: NDArray[np.uint8], characters: int) -> Keys:
    """Return as uint64 [shingles] the keys of all shingles, of `characters` characters each, of a
    text in UTF-8, in the order of the text, repetitions included."""
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
def compare(own: Keys, keys: Keys, spans: Integers, enough: float) -> NDArray[np.float64]:
    """Return the Jaccard similarity of the keys `own` to `keys[start:end]`, both ascending and
    distinct, for each span (start, end) of `spans` [others, 2], up to and with the first that is at
    least `enough`, as a float64 array that may be shorter than the spans.

    Common keys are counted from both ends at once, so that the steps from the front do not wait for
    the steps from the back, and without branches, which a processor could not predict.
    """
    similar = np.empty(spans.shape[0])
    for number in range(spans.shape[0]):
        theirs = keys[spans[number, 0] : spans[number, 1]]
        shared = 0
        place = 0
        other = 0
        last = own.shape[0] - 1
        other_last = theirs.shape[0] - 1
        while place <= last and other <= other_last:
            left = own[place]
            right = theirs[other]
            shared += left == right
            place += left <= right
            other += right <= left
            if place < last and other < other_last:
                left = own[last]
                right = theirs[other_last]
                shared += left == right
                last -= left >= right
                other_last -= right >= left
        similar[number] = shared / (own.shape[0] + theirs.shape[0] - shared)
        if similar[number] >= enough:
            return similar[: number + 1]
    return similar


class ShingledTexts:
    """Cache of texts' shingles of `characters` characters. The method `similarities` returns an
    array of the Jaccard similarities of one text to others, all given by their numbers; it ends
    with the first similarity that is at least the method's `enough`, if there is one. The function
    `text_of` is called with the number of a text that is not cached, and returns the text. A cache
    that would exceed `most` shingles is emptied first."""

    def __init__(
        self, text_of: Callable[[int], str], characters: int, most: int = MOST_REMEMBERED
    ) -> None:
        self._text_of = text_of
        self._characters = characters
        self._keys = np.empty(most, np.uint64)
        self._spans = dict[int, Span]()
        self._end = 0

    def similarities(
        self, number: int, others: Sequence[int], enough: float
    ) -> NDArray[np.float64]:
        """Return a float64 array of the Jaccard similarities of the text with the number `number`
        to the texts with the numbers `others`, at least one, in their order. It ends with the first
        similarity that is at least `enough`, so it may be shorter than `others`; with an `enough`
        above 1 it never is."""
        ((start, end),) = [*self._find([number])][-1]
        own = self._keys[start:end].copy()
        similar = []
        for some in self._find(others):
            similar.append(compare(own, self._keys, np.array(some), enough))
            if similar[-1][-1] >= enough:
                break
        return np.concatenate(similar)

    def _find(self, numbers: Sequence[int]) -> Iterator[list[Span]]:
        """Yield lists of the spans (start, end) that the keys of the texts `numbers` have in the
        cache, in order; most often one list. A list is valid until the next one is requested, which
        may empty the cache."""
        some: list[Span] = []
        for number in numbers:
            if number not in self._spans:
                keys = shingle_keys(self._text_of(number), self._characters)
                if self._end + len(keys) > len(self._keys):
                    if some:
                        yield some
                    self._spans = {}
                    self._end = 0
                    some = []
                    if len(keys) > len(self._keys):
                        self._keys = np.empty(len(keys), np.uint64)
                start = self._end
                self._end += len(keys)
                self._keys[start : self._end] = keys
                self._spans[number] = start, self._end
            some.append(self._spans[number])
        yield some
