"""Character shingles of a text: as strings, and as 64-bit keys, which identify short shingles
without collisions."""

import numpy as np
from numpy.typing import NDArray

from mlm_repro.data_pipeline.arrays import Integers
from mlm_repro.lineage.loops import compiled

CHUNK = 1024
"""Number of shingles packed at a time: their keys and positions stay in a core's first cache."""
EMPTY = np.uint64(0xFFFFFFFFFFFFFFFF)
"""Marks a free slot in a table of keys, because no shingle has this key."""

_BYTE = np.uint64(8)
_LONG = np.uint64(0xFE << 56)
_LONG_MASK = np.uint64((1 << 56) - 1)
_ODD = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)


def shingles(text: str, characters: int = 5) -> frozenset[str]:
    """Return a frozenset of the runs of `characters` characters, by default 5, of a text. A text
    that is shorter is its own only shingle."""
    return frozenset(
        text[start : start + characters] for start in range(max(1, len(text) - characters + 1))
    )


def as_bytes(text: str) -> NDArray[np.uint8]:
    """Return the text in UTF-8, as uint8 [bytes], a read-only array; a lone surrogate keeps its own
    three bytes."""
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)


@compiled
def width(lead: int) -> int:
    """Return the number of bytes of the UTF-8 character whose first byte is `lead`."""
    if lead < 0x80:
        return 1
    if lead < 0xE0:
        return 2
    return 3 if lead < 0xF0 else 4


@compiled
def first_end(data: NDArray[np.uint8], characters: int) -> int:
    """Return the end, in bytes, of the first shingle of `characters` characters in `data`, a text
    in UTF-8; an end past the data if it holds too few characters."""
    end = 0
    for _ in range(characters):
        end += width(data[end]) if end < data.shape[0] else 1
    return end


@compiled
def pack(
    data: NDArray[np.uint8],
    start: int,
    end: int,
    keys: NDArray[np.uint64],
    starts: Integers,
    ends: Integers,
) -> tuple[int, int, int]:
    """Write the keys of shingles of `data`, a text in UTF-8, to `keys`, and the indices in `data`
    of the shingles' first bytes to `starts`, and of the bytes behind their last ones to `ends`:
    from the shingle `data[start:end]` on, until `keys` is full or the text ends.

    A shingle of at most eight bytes is its own key: among shingles of one number of characters no
    two share it, because that number restores leading NULs. A longer one has a hash as its key, in
    a range that no short one reaches (no character begins with the byte 0xFE), and equal keys of
    long shingles must be compared byte by byte.

    Returns three numbers: how many keys were written, and start and end of the next shingle. An end
    past the data means that there is no next one.
    """
    size = data.shape[0]
    recent = np.uint64(0)
    for index in range(max(0, end - 8), min(end, size)):
        recent = (recent << _BYTE) | np.uint64(data[index])
    count = 0
    while end <= size and count < keys.shape[0]:
        length = end - start
        if length <= 8:
            keys[count] = recent & (EMPTY >> np.uint64(64 - 8 * length))
        else:
            mixed = np.uint64(0)
            for index in range(start, end):
                mixed = (mixed ^ np.uint64(data[index])) * _ODD
            keys[count] = _LONG | ((mixed ^ (mixed >> _HALF)) & _LONG_MASK)
        starts[count] = start
        ends[count] = end
        count += 1
        start += width(data[start])
        if end == size:
            end += 1
            break
        new_end = end + width(data[end])
        for index in range(end, new_end):
            recent = (recent << _BYTE) | np.uint64(data[index])
        end = new_end
    return count, start, end
