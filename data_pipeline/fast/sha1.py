"""SHA-1 of many short strings at once, compiled: one string in each lane of the processor's vector registers."""

import numpy as np
from numpy.typing import NDArray

from data_pipeline.fast.kernels import compiled

Numbers = NDArray[np.uint32]
Places = NDArray[np.int64]
LONGEST = 55
"""Most bytes of a string that fits one SHA-1 block with its padding."""
LANES = 32
"""Strings hashed together."""
WORDS, ROUNDS = 16, 80
"""Words of a block, and rounds."""
OPENING = (0x0F4B87C3, 0x40C951D8, 0x62EB73FA, 0xEFCDAB89, 0x67452301)
"""FIPS 180-4's e, d and c, rotated left by 2, then b and a."""


def working_space() -> tuple[Numbers, Numbers]:
    """Working memory of `sha1_hashes32`: the words of the schedule, and the states, which begin with OPENING."""
    states = np.zeros((len(OPENING) + ROUNDS, LANES), np.uint32)
    states[: len(OPENING)] = np.array(OPENING, np.uint32)[:, None]
    return np.zeros(ROUNDS * LANES, np.uint32), states.ravel()


@compiled
def _rotate(value: np.uint32, bits: int) -> np.uint32:
    return np.uint32((value << np.uint32(bits)) | (value >> np.uint32(32 - bits)))


@compiled
def _earlier(states: Numbers, at: int) -> tuple[np.uint32, np.uint32, np.uint32]:
    """The variables b, c and d of the round that appends the state `at`."""
    return states[at + 3 * LANES], _rotate(states[at + 2 * LANES], 30), _rotate(states[at + LANES], 30)


@compiled
def _append(states: Numbers, schedule: Numbers, at: int, mixed: np.uint32, constant: np.uint32) -> None:
    total = _rotate(states[at + 4 * LANES], 5) + mixed + _rotate(states[at], 30) + schedule[at] + constant
    states[at + 5 * LANES] = np.uint32(total)


@compiled
def sha1_hashes32(
    data: NDArray[np.uint8], starts: Places, ends: Places, chosen: Places, hashes: Numbers, schedule: Numbers,
    states: Numbers,
) -> None:  # fmt: skip
    """Write the first four bytes of SHA-1 of `data[starts[n]:ends[n]]`, little-endian, to `hashes[n]`, n in `chosen`.

    FIPS 180-4, with its five variables as one sequence: each round appends a state, and b is the state before it, c, d
    and e are those before that, rotated. Strings are at most LONGEST bytes.
    """
    for first in range(0, chosen.shape[0], LANES):
        lanes = min(LANES, chosen.shape[0] - first)
        schedule[: WORDS * LANES] = 0
        for lane in range(lanes):
            start, end = starts[chosen[first + lane]], ends[chosen[first + lane]]
            for place in range(end - start):
                bits = np.uint32(24 - 8 * (place & 3))
                schedule[(place >> 2) * LANES + lane] |= np.uint32(data[start + place]) << bits
            place = end - start
            schedule[(place >> 2) * LANES + lane] |= np.uint32(0x80) << np.uint32(24 - 8 * (place & 3))
            schedule[(WORDS - 1) * LANES + lane] = 8 * place
        for at in range(WORDS * LANES, ROUNDS * LANES):
            word = schedule[at - 3 * LANES] ^ schedule[at - 8 * LANES]
            word ^= schedule[at - 14 * LANES] ^ schedule[at - 16 * LANES]
            schedule[at] = _rotate(word, 1)
        for at in range(20 * LANES):
            b, c, d = _earlier(states, at)
            _append(states, schedule, at, (b & c) | (~b & d), np.uint32(0x5A827999))
        for at in range(20 * LANES, 40 * LANES):
            b, c, d = _earlier(states, at)
            _append(states, schedule, at, b ^ c ^ d, np.uint32(0x6ED9EBA1))
        for at in range(40 * LANES, 60 * LANES):
            b, c, d = _earlier(states, at)
            _append(states, schedule, at, (b & c) | (b & d) | (c & d), np.uint32(0x8F1BBCDC))
        for at in range(60 * LANES, 80 * LANES):
            b, c, d = _earlier(states, at)
            _append(states, schedule, at, b ^ c ^ d, np.uint32(0xCA62C1D6))
        for lane in range(lanes):
            word = np.uint32(states[(ROUNDS + 4) * LANES + lane] + np.uint32(0x67452301))
            inner = ((word & np.uint32(0xFF00)) << np.uint32(8)) | ((word >> np.uint32(8)) & np.uint32(0xFF00))
            hashes[chosen[first + lane]] = (word << np.uint32(24)) | inner | (word >> np.uint32(24))
