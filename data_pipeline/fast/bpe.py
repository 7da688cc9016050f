"""Byte-level BPE compiled to machine code: the ids of Hugging Face `tokenizers`, many times faster.

Text is cut into words by GPT-2's expression
`'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+`.
A word of up to 32 bytes is looked up among those met before and merged, lowest rank and leftmost first, if it is not
there; one of up to 8 bytes, as most are, is one integer, beside its first token. A longer one than 32 bytes is merged
from a heap, in n log n. Memory is 3 bytes a byte of text besides the text itself, 25
where it is one word without an end. The compiled functions share a file: numba's cache sees changes of one file only.
"""

import heapq
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from data_pipeline.fast.kernels import call_first, compiled
from lineage.errors import BadInput

LETTER, NUMBER, OTHER, SPACE = range(4)
PROBES = {LETTER: "a", NUMBER: "1", OTHER: "!"}
"""A character of each class that joins others of its class; white space joins none of them."""
LAST_CLASSIFIED = 0x3FFFF
"""Planes above hold no letters, numbers or white space in any Unicode version."""
SHORT_BITS, LONGEST_SHORT = 17, 8
SLOTS, LONGEST_CACHED = 1 << 16, 32
EMPTY, NO_RANK, NO_WORD = -1, (1 << 31) - 1, (1 << 64) - 1
ID_BITS, RANK_BITS, NO_PAIR = 20, 24, (1 << 64) - 1
"""A merge is one integer: its left token, its right token and its rank."""


@lru_cache(maxsize=1)
def character_classes() -> NDArray[np.uint8]:
    """The class of every code point, as the installed `tokenizers` cuts text: [0x110000].

    It is asked once for all characters in their order: the pieces it cuts are runs of one class.
    """
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    codes = [code for code in range(LAST_CLASSIFIED + 1) if code != ord(" ") and not 0xD800 <= code < 0xE000]
    text = "".join(map(chr, codes))
    classes = np.full(0x110000, OTHER, np.uint8)
    classes[ord(" ")] = SPACE
    for _, (start, end) in pre_tokenizer.pre_tokenize_str(text):
        joined = (
            kind for kind, probe in PROBES.items() if len(pre_tokenizer.pre_tokenize_str(probe + text[start])) == 1
        )
        classes[codes[start:end]] = next(joined, SPACE)
    return classes


@compiled
def _step(data: Any, at: int, classes: Any) -> tuple[int, int]:
    """Class of the character at `at` and the position after it."""
    byte = np.int64(data[at])
    if byte < 0x80:
        return classes[byte], at + 1
    if byte < 0xE0:
        return classes[(byte & 0x1F) << 6 | (data[at + 1] & 0x3F)], at + 2
    if byte < 0xF0:
        return classes[(byte & 0xF) << 12 | (data[at + 1] & 0x3F) << 6 | (data[at + 2] & 0x3F)], at + 3
    code = (byte & 7) << 18 | (data[at + 1] & 0x3F) << 12 | (data[at + 2] & 0x3F) << 6 | (data[at + 3] & 0x3F)
    return classes[code], at + 4


@compiled
def _contraction_end(data: Any, start: int) -> int:
    """Where `'s 't 'm 'd 're 've 'll` at `start` ends; `start` if none is there."""
    left = len(data) - start
    if left > 1 and data[start + 1] in (ord("s"), ord("t"), ord("m"), ord("d")):
        return start + 2
    if left > 2:
        first, second = data[start + 1], data[start + 2]
        if (second == ord("e") and first in (ord("r"), ord("v"))) or (second == ord("l") and first == ord("l")):
            return start + 3
    return start


@compiled
def _word_end(data: Any, start: int, classes: Any) -> int:
    """Where the word that begins at `start` ends."""
    if data[start] == ord("'"):
        end = _contraction_end(data, start)
        if end > start:
            return end
    kind, at = _step(data, start, classes)
    if data[start] == ord(" ") and at < len(data):
        following, after = _step(data, at, classes)
        if following != SPACE:
            kind, at = following, after
    last = start
    while at < len(data):
        following, after = _step(data, at, classes)
        if following != kind:
            break
        last, at = at, after
    # White space before a word leaves its last character to that word.
    return last if kind == SPACE and at < len(data) and last > start else at


@compiled
def _slot(pair: Any, size: int) -> Any:
    return np.int64(pair * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)) & (size - 1)


@compiled
def _index_pairs(merges: Any, table: Any) -> None:
    """Fill the hash table of merges; a pair that comes twice has its last rank, as in `tokenizers`."""
    for rank in range(len(merges)):
        pair = np.uint64(merges[rank, 0]) << np.uint64(ID_BITS) | np.uint64(merges[rank, 1])
        at = _slot(pair, len(table))
        while table[at] != NO_PAIR and table[at] >> np.uint64(RANK_BITS) != pair:
            at = (at + 1) & (len(table) - 1)
        table[at] = pair << np.uint64(RANK_BITS) | np.uint64(rank)


@compiled
def _rank(left: int, right: int, table: Any) -> Any:
    """Rank of the merge of two tokens, or NO_RANK."""
    pair = np.uint64(left) << np.uint64(ID_BITS) | np.uint64(right)
    at = _slot(pair, len(table))
    while table[at] >> np.uint64(RANK_BITS) != pair:
        if table[at] == NO_PAIR:
            return NO_RANK
        at = (at + 1) & (len(table) - 1)
    return np.int64(table[at] & np.uint64((1 << RANK_BITS) - 1))


@compiled
def _merge_short(data: Any, start: int, end: int, ids: Any, byte_ids: Any, merges: Any, merged: Any, ranks: Any) -> int:
    """Write the tokens of a word of at most LONGEST_CACHED bytes into `ids`; returns how many they are."""
    count = end - start
    for at in range(count):
        ids[at] = byte_ids[data[start + at]]
    for at in range(count - 1):
        ranks[at] = _rank(ids[at], ids[at + 1], merges)
    while True:
        lowest, left = NO_RANK, 0
        for at in range(count - 1):
            if ranks[at] < lowest:
                lowest, left = ranks[at], at
        if lowest == NO_RANK:
            return count
        ids[left] = merged[lowest]
        count -= 1
        for at in range(left + 1, count):
            ids[at], ranks[at - 1] = ids[at + 1], ranks[at]
        if left > 0:
            ranks[left - 1] = _rank(ids[left - 1], ids[left], merges)
        if left + 1 < count:
            ranks[left] = _rank(ids[left], ids[left + 1], merges)


@compiled
def _merge(data: Any, start: int, end: int, ids: Any, byte_ids: Any, merges: Any, merged: Any) -> int:
    """Write the tokens of one word at the beginning of `ids`; returns how many they are."""
    size = end - start
    previous, following = np.empty(size + 1, np.int32), np.empty(size, np.int32)
    for at in range(size):
        ids[at] = byte_ids[data[start + at]]
        previous[at], following[at] = at - 1, at + 1
    heap = [np.int64(0) for _ in range(0)]
    for at in range(size - 1):
        rank = _rank(ids[at], ids[at + 1], merges)
        if rank != NO_RANK:
            heap.append(np.int64(rank) << 32 | at)
    heapq.heapify(heap)
    while heap:
        entry = heapq.heappop(heap)
        left = entry & 0xFFFFFFFF
        right = following[left]
        if ids[left] == EMPTY or right == size:
            continue
        rank = _rank(ids[left], ids[right], merges)
        if rank != entry >> 32:
            continue
        ids[left], ids[right] = merged[rank], EMPTY
        after, before = following[right], previous[left]
        following[left], previous[after] = after, left
        if before >= 0:
            rank = _rank(ids[before], ids[left], merges)
            if rank != NO_RANK:
                heapq.heappush(heap, np.int64(rank) << 32 | before)
        if after < size:
            rank = _rank(ids[left], ids[after], merges)
            if rank != NO_RANK:
                heapq.heappush(heap, np.int64(rank) << 32 | left)
    at, count = 0, 0
    while at < size:
        ids[count] = ids[at]
        at, count = following[at], count + 1
    return count


@compiled
def _key(data: Any, start: int, size: int) -> Any:
    """The bytes of a word of at most LONGEST_SHORT, ones above them; eight bytes at once where there are as many."""
    key = ~np.uint64(0)
    if start + LONGEST_SHORT > len(data):
        for at in range(start + size - 1, start - 1, -1):
            key = key << np.uint64(8) | np.uint64(data[at])
        return key
    first, eight = np.uint64(start), np.uint64(0)
    for at in range(LONGEST_SHORT):
        eight |= np.uint64(data[first + np.uint64(at)]) << np.uint64(8 * at)
    unused = np.uint64(8 * (LONGEST_SHORT - size))
    return eight | ~(key >> unused)


@compiled
def _encode(
    data: Any, out: Any, classes: Any, byte_ids: Any, merges: Any, merged: Any,
    short: Any, tails: Any, words: Any, lengths: Any, tokens: Any, counts: Any,
) -> int:  # fmt: skip
    """Write the ids of UTF-8 text into `out`, which has room for one a byte; returns how many they are.

    The caches have one place for each hash. A word of up to LONGEST_SHORT bytes is short[s, 0], its bytes with ones
    above them, which no UTF-8 has; short[s, 1] is its count of ids above 32 bits and the first id, tails[s] are all
    ids. Of longer words, word s is words[s, :lengths[s]], its ids are tokens[s, :counts[s]].
    """
    ranks = np.empty(LONGEST_CACHED, np.int32)
    start = 0
    count: Any = 0
    while start < len(data):
        first = end = start + (data[start] == ord(" "))
        while end < len(data) and ord("a") <= data[end] | 0x20 <= ord("z"):
            end += 1
        if end == first or (end < len(data) and data[end] >= 0x80):
            end = _word_end(data, start, classes)
        size = end - start
        if size <= LONGEST_SHORT:
            key = _key(data, start, size)
            slot = np.int64(key * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(64 - SHORT_BITS))
            if short[slot, 0] != key:
                ids = np.int64(_merge_short(data, start, end, tails[slot], byte_ids, merges, merged, ranks))
                short[slot, 0], short[slot, 1] = key, np.uint64(ids << 32 | np.int64(tails[slot, 0]))
            entry = np.int64(short[slot, 1])
            out[count] = entry & 0xFFFFFFFF
            for at in range(1, entry >> 32):
                out[count + at] = tails[slot, at]
            count += entry >> 32
            start = end
            continue
        if size > LONGEST_CACHED:
            count += _merge(data, start, end, out[count:], byte_ids, merges, merged)
            start = end
            continue
        code = np.uint64(0xCBF29CE484222325)
        for at in range(start, end):
            code = (code ^ np.uint64(data[at])) * np.uint64(0x100000001B3)
        slot = np.int64((code ^ code >> np.uint64(32)) & np.uint64(SLOTS - 1))
        known = lengths[slot] == size
        at = 0
        while known and at < size:
            known = words[slot, at] == data[start + at]
            at += 1
        if not known:
            counts[slot] = _merge_short(data, start, end, tokens[slot], byte_ids, merges, merged, ranks)
            lengths[slot] = size
            for at in range(size):
                words[slot, at] = data[start + at]
        for at in range(counts[slot]):
            out[count + at] = tokens[slot, at]
        count += counts[slot]
        start = end
    return count


class FastBpe:
    """The ids of a byte-level BPE vocabulary without special tokens."""

    def __init__(self, vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> None:
        """`vocabulary` and `merges` are in GPT-2's alphabet of bytes. Raises KeyError if a byte is missing."""
        byte_ids = np.array([vocabulary[letter] for letter in _byte_letters()], np.int32)
        pairs = np.array([(vocabulary[left], vocabulary[right]) for left, right in merges], np.int64).reshape(-1, 2)
        merged = np.array([vocabulary[left + right] for left, right in merges], np.int32)
        if max(vocabulary.values()) + 1 >= 1 << ID_BITS or len(merges) >= 1 << RANK_BITS:
            raise BadInput(f"a vocabulary has at most {1 << ID_BITS:,} tokens")
        table = np.full(1 << (2 * len(pairs) + 1).bit_length(), NO_PAIR, np.uint64)
        call_first(_index_pairs, pairs, table)
        short = np.full((1 << SHORT_BITS, 2), NO_WORD, np.uint64)
        dtype = np.uint16 if max(vocabulary.values()) < 1 << 16 else np.int32  # half the memory to wait for
        tails = np.empty((1 << SHORT_BITS, LONGEST_SHORT), dtype)
        words, lengths = np.empty((SLOTS, LONGEST_CACHED), np.uint8), np.zeros(SLOTS, np.uint8)
        tokens, counts = np.empty((SLOTS, LONGEST_CACHED), dtype), np.empty(SLOTS, np.uint8)
        classes = character_classes()
        self._tables = (classes, byte_ids, table, merged, short, tails, words, lengths, tokens, counts)
        call_first(_encode, np.frombuffer(b"a", np.uint8), np.empty(1, np.int32), *self._tables)

    def encode(self, text: str) -> NDArray[np.int32]:
        """Token ids of the text. Raises BadInput for text of more than 2 GiB."""
        data = np.frombuffer(text.encode("utf-8"), np.uint8)
        if len(data) > np.iinfo(np.int32).max:
            raise BadInput(f"a text of {len(data):,} bytes is too long to be encoded; the longest is 2 GiB")
        out = np.empty(len(data), np.int32)
        count = _encode(data, out, *self._tables)
        return out[:count].copy()


def _byte_letters() -> list[str]:
    """What stands for each byte in GPT-2's vocabulary: itself, or one from U+0100 on if it is not visible."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]
