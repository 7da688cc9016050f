"""SHA-1 of short strings, compiled."""

import numpy as np
from numpy.typing import NDArray

from data_pipeline.kernels import compiled

LONGEST = 55
"""Most bytes of a string that fits one SHA-1 block with its padding."""


@compiled
def _rotate(value: np.uint32, bits: int) -> np.uint32:
    return np.uint32((value << np.uint32(bits)) | (value >> np.uint32(32 - bits)))


@compiled
def sha1_hash32(data: NDArray[np.uint8], start: int, end: int, schedule: NDArray[np.uint32]) -> np.uint32:
    """First four bytes of SHA-1 of `data[start:end]`, at most LONGEST bytes, as a little-endian integer (FIPS 180-4).

    `schedule` is 80 words to work in.
    """
    size = end - start
    for place in range(16):
        schedule[place] = 0
    for place in range(size):
        schedule[place >> 2] |= np.uint32(data[start + place]) << np.uint32(24 - 8 * (place & 3))
    schedule[size >> 2] |= np.uint32(0x80) << np.uint32(24 - 8 * (size & 3))
    schedule[15] = size * 8
    for place in range(16, 80):
        word = schedule[place - 3] ^ schedule[place - 8] ^ schedule[place - 14] ^ schedule[place - 16]
        schedule[place] = _rotate(word, 1)
    a, b, c = np.uint32(0x67452301), np.uint32(0xEFCDAB89), np.uint32(0x98BADCFE)
    d, e = np.uint32(0x10325476), np.uint32(0xC3D2E1F0)
    for place in range(80):
        if place < 20:
            mixed, constant = (b & c) | (~b & d), np.uint32(0x5A827999)
        elif place < 40:
            mixed, constant = b ^ c ^ d, np.uint32(0x6ED9EBA1)
        elif place < 60:
            mixed, constant = (b & c) | (b & d) | (c & d), np.uint32(0x8F1BBCDC)
        else:
            mixed, constant = b ^ c ^ d, np.uint32(0xCA62C1D6)
        a, b, c, d, e = np.uint32(_rotate(a, 5) + mixed + e + schedule[place] + constant), a, _rotate(b, 30), c, d
    first = np.uint32(a + np.uint32(0x67452301))
    return np.uint32(
        (first << np.uint32(24))
        | ((first & np.uint32(0xFF00)) << np.uint32(8))
        | ((first >> np.uint32(8)) & np.uint32(0xFF00))
        | (first >> np.uint32(24))
    )
