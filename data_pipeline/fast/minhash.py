"""MinHash signatures: datasketch's `affine32` scheme over SHA-1 hashes of UTF-8 shingles.

`signature` is the compiled form of `reference_signature`, which calls datasketch. Equal hashes add
nothing to a minimum, so each is permuted once. SHA-1 of a shingle is remembered in a table of fixed
size; shingles outside it are hashed together: one string in each lane of the processor's vector
registers. None of this changes a bit of the result.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mlm_repro.data_pipeline.arrays import Integers
from mlm_repro.data_pipeline.fast.exact import Arrays, checked_with_tables
from mlm_repro.data_pipeline.fast.shingles import CHUNK, EMPTY, as_bytes, first_end, pack, shingles
from mlm_repro.lineage.loops import call_first, compiled

Numbers = NDArray[np.uint32]
Places = Integers
LONGEST = 55
"""Largest string, in bytes, that fits one SHA-1 block with its padding."""
LANES = 32
"""Number of strings whose SHA-1 is computed together."""
WORDS = 16
"""Number of 32-bit words in a block of SHA-1."""
ROUNDS = 80
"""Number of rounds over a block of SHA-1."""
OPENING = (0x0F4B87C3, 0x40C951D8, 0x62EB73FA, 0xEFCDAB89, 0x67452301)
"""Initial values of SHA-1's variables in FIPS 180-4: e, d and c, each rotated left by 2, then b and
a."""


def working_space() -> tuple[Numbers, Numbers]:
    """Return working memory for hashing LANES strings at once with SHA-1, as two flat uint32
    arrays: the words of the schedule, all 0, and the states, which begin with each value of
    OPENING, LANES times, and are else 0."""
    states = np.zeros((len(OPENING) + ROUNDS, LANES), np.uint32)
    states[: len(OPENING)] = np.array(OPENING, np.uint32)[:, None]
    return np.zeros(ROUNDS * LANES, np.uint32), states.ravel()


@compiled
def _rotate(value: np.uint32, bits: int) -> np.uint32:
    return np.uint32((value << np.uint32(bits)) | (value >> np.uint32(32 - bits)))


@compiled
def _earlier(states: Numbers, at: int) -> tuple[np.uint32, np.uint32, np.uint32]:
    """Return SHA-1's variables b, c and d, read from `states`, for the round and the lane that
    append the state with the index `at`; OPENING is not counted in the index."""
    return (
        states[at + 3 * LANES],
        _rotate(states[at + 2 * LANES], 30),
        _rotate(states[at + LANES], 30),
    )


@compiled
def _append(
    states: Numbers, schedule: Numbers, at: int, mixed: np.uint32, constant: np.uint32
) -> None:
    """Compute one round of SHA-1 in one lane from the five states that lie LANES apart in `states`,
    the oldest at the index `at`, and write the new state, one 32-bit word, behind them at `at` + 5
    · LANES. SHA-1's e is the oldest, which is kept as it was computed and rotated left by 30 here.
    `mixed` is the value of the round's function of b, c and d, `constant` its constant, and
    `schedule[at]` its word."""
    total = (
        _rotate(states[at + 4 * LANES], 5)
        + mixed
        + _rotate(states[at], 30)
        + schedule[at]
        + constant
    )
    states[at + 5 * LANES] = np.uint32(total)


@compiled
def sha1_hashes32(
    data: NDArray[np.uint8],
    starts: Places,
    ends: Places,
    chosen: Places,
    hashes: Numbers,
    schedule: Numbers,
    states: Numbers,
) -> None:
    """Write the first four bytes of SHA-1 of `data[starts[n]:ends[n]]`, little-endian, to
    `hashes[n]`, for each n in `chosen`. `schedule` and `states` are working memory from
    `working_space`. Strings have at most LONGEST bytes, which is not checked: a longer one gets a
    wrong hash.

    FIPS 180-4, with its five variables as one sequence: each round appends a state. b is the state
    before it; c, d and e are the states before b, rotated.
    """
    for first in range(0, chosen.shape[0], LANES):
        lanes = min(LANES, chosen.shape[0] - first)
        schedule[: WORDS * LANES] = 0
        for lane in range(lanes):
            start = starts[chosen[first + lane]]
            end = ends[chosen[first + lane]]
            for index in range(end - start):
                bits = np.uint32(24 - 8 * (index & 3))
                schedule[(index >> 2) * LANES + lane] |= np.uint32(data[start + index]) << bits
            index = end - start
            schedule[(index >> 2) * LANES + lane] |= np.uint32(0x80) << np.uint32(
                24 - 8 * (index & 3)
            )
            schedule[(WORDS - 1) * LANES + lane] = 8 * index
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
            inner = ((word & np.uint32(0xFF00)) << np.uint32(8)) | (
                (word >> np.uint32(8)) & np.uint32(0xFF00)
            )
            hashes[chosen[first + lane]] = (word << np.uint32(24)) | inner | (word >> np.uint32(24))


if TYPE_CHECKING:
    from datasketch import MinHash

SCHEME = "affine32"
BATCH_SHINGLES = 1 << 16
TABLE_BITS = 19
RECENT_HASHES = 1 << 14
UNIQUE_HASHES = 1 << 13

Words = NDArray[np.uint64]
Sign = Callable[[str], Numbers]

SAMPLES = (
    "",
    "abc",
    "abcde",
    "\0\0abc\0\0\0\0\0\0",
    "The quick brown fox jumps over the lazy dog. " * 3,
    "naïve café, “quoted” – Straße, ﬁn; привет мир; 漢字かな交じり文; 👩‍👩‍👧 \U0010ffff",
    " ".join(str(number * number) for number in range(4000)),
)


def signature(text: str, num_permutations: int = 128, shingle_characters: int = 5) -> Numbers:
    """Return a text's MinHash signature as uint32 [num_permutations], by default 128: for each
    permutation the smallest permuted hash of the text's shingles, which have `shingle_characters`
    characters, by default 5; a shorter text is its own only shingle."""
    return _signer(num_permutations, shingle_characters)(text)


def reference_signature(
    text: str, num_permutations: int = 128, shingle_characters: int = 5
) -> Numbers:
    """Return a text's MinHash signature as uint32 [num_permutations], by default 128: for each
    permutation the smallest permuted hash of the text's shingles, which have `shingle_characters`
    characters, by default 5; a shorter text is its own only shingle. Like `signature`, but
    computed by datasketch itself and slower."""
    sketch = as_sketch(None, num_permutations)
    encoded = [
        shingle.encode("utf-8", "surrogatepass") for shingle in shingles(text, shingle_characters)
    ]
    for start in range(0, len(encoded), BATCH_SHINGLES):
        sketch.update_batch(encoded[start : start + BATCH_SHINGLES])
    return np.asarray(sketch.hashvalues, np.uint32)


def as_sketch(values: Numbers | None, num_permutations: int) -> "MinHash":
    """Return datasketch's MinHash object, of `num_permutations` permutations, for the signature
    `values`, or an empty one for None."""
    from datasketch import MinHash

    return MinHash(
        num_permutations, hashvalues=values, **_permutations(num_permutations), scheme=SCHEME
    )


@cache
def _signer(num_permutations: int, shingle_characters: int) -> Sign:
    """Return a function from a text to its signature, uint32 [num_permutations], for shingles of
    `shingle_characters` characters: the compiled one if it gives here what datasketch gives for
    SAMPLES, else datasketch's."""
    reference = partial(
        reference_signature,
        num_permutations=num_permutations,
        shingle_characters=shingle_characters,
    )
    tables = f"permutations-{num_permutations}-{shingle_characters}", "datasketch"
    fast = partial(_compiled_signer, shingle_characters, reference)
    make = partial(_permutations, num_permutations)
    return checked_with_tables("MinHash", tables, make, fast, reference, SAMPLES, np.array_equal)


@cache
def _permutations(count: int) -> dict[str, Numbers]:
    from datasketch import MinHash  # imports scipy, which is slow

    return {"permutations": np.asarray(MinHash(num_perm=count, seed=1, scheme=SCHEME).permutations)}


def _compiled_signer(shingle_characters: int, reference: Sign, arrays: Arrays) -> Sign:
    """Return a compiled function from a text to its MinHash signature, uint32 [permutations], of
    its shingles of `shingle_characters` characters. `arrays` has under `permutations` the
    multipliers and the offsets, [2, permutations]. A text shorter than a shingle is given to
    `reference`, a function of the same kind. The function changes tables that it keeps from call to
    call, so one thread at a time may call it."""
    multipliers, offsets = np.ascontiguousarray(arrays["permutations"])
    known = np.full((1 << TABLE_BITS, 2), EMPTY)
    recent = np.zeros(RECENT_HASHES, np.uint64)
    tables = (multipliers, offsets, known, recent, *working_space())
    document = 0

    def sign(text: str) -> Numbers:
        nonlocal document
        if len(text) < shingle_characters:
            return reference(text)
        document += 1
        return _signature(as_bytes(text), shingle_characters, *tables, document)

    call_first(_signature, as_bytes(""), shingle_characters, *tables, document)
    return sign


@compiled
def _signature(
    data: NDArray[np.uint8],
    characters: int,
    multipliers: Numbers,
    offsets: Numbers,
    known: Words,
    recent: Words,
    schedule: Numbers,
    states: Numbers,
    document: int,
) -> Numbers:
    """Return the signature, uint32 [permutations], of `data`, a text in UTF-8 that has at least one
    shingle of `characters` characters. `multipliers` and `offsets` [permutations] define the
    permutations.

    `known` [1 << TABLE_BITS, 2], at first EMPTY, caches shingles' keys and hashes, side by side,
    across documents. `recent` [RECENT_HASHES], at first 0, holds the hashes met in this document,
    each with the document's number. Both are changed here, and the caller gives them again with the
    next text. `document` must be another number, from 1, for each text. `schedule` and `states` are
    from `working_space`.
    """
    minima = np.full(multipliers.shape[0], np.uint32(0xFFFFFFFF))
    keys = np.empty(CHUNK, np.uint64)
    starts = np.empty(CHUNK, np.int64)
    ends = np.empty(CHUNK, np.int64)
    mixed = np.empty(CHUNK, np.uint32)
    missing = np.empty(CHUNK, np.int64)
    hashes = np.empty(UNIQUE_HASHES, np.uint32)
    tag = np.uint64(document) << np.uint64(32)
    start = 0
    end = first_end(data, characters)
    unique = 0
    while end <= data.shape[0]:
        count, start, end = pack(data, start, end, keys, starts, ends)
        unknown = 0
        for number in range(count):
            slot = _slot(keys[number])
            mixed[number] = np.uint32(known[slot, 1])
            missing[unknown] = number
            unknown += known[slot, 0] != keys[number]
        sha1_hashes32(data, starts, ends, missing[:unknown], mixed, schedule, states)
        for number in missing[:unknown]:
            mixed[number] = _mix(mixed[number])
            if ends[number] - starts[number] <= 8:
                slot = _slot(keys[number])
                known[slot, 0] = keys[number]
                known[slot, 1] = np.uint64(mixed[number])
        for number in range(count):
            slot_of_hash = np.int64(mixed[number]) & (RECENT_HASHES - 1)
            tagged = tag | np.uint64(mixed[number])
            hashes[unique] = mixed[number]
            unique += recent[slot_of_hash] != tagged
            recent[slot_of_hash] = tagged
        if unique > UNIQUE_HASHES - CHUNK or end > data.shape[0]:
            _lower(minima, hashes[:unique], multipliers, offsets)
            unique = 0
    return minima


@compiled
def _slot(key: np.uint64) -> np.int64:
    return np.int64((key * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - TABLE_BITS))


@compiled
def _lower(minima: Numbers, hashes: Numbers, multipliers: Numbers, offsets: Numbers) -> None:
    """Lower each of `minima`, in place, to the smallest of the numbers hash · multiplier + offset,
    modulo 2³², over all `hashes`, if that is smaller. The multiplier and the offset are those at
    the same index in `multipliers` and `offsets`."""
    for permutation in range(minima.shape[0]):
        multiplier = multipliers[permutation]
        offset = offsets[permutation]
        lowest = minima[permutation]
        for number in range(hashes.shape[0]):
            lowest = min(lowest, np.uint32(hashes[number] * multiplier + offset))
        minima[permutation] = lowest


@compiled
def _mix(value: np.uint32) -> np.uint32:
    """Return the 32-bit hash `value` mixed by MurmurHash3's finalizer, as datasketch does before it
    permutes hashes, as uint32."""
    value ^= value >> np.uint32(16)
    value = np.uint32(value * np.uint32(0x85EBCA6B))
    value ^= value >> np.uint32(13)
    value = np.uint32(value * np.uint32(0xC2B2AE35))
    return np.uint32(value ^ (value >> np.uint32(16)))
