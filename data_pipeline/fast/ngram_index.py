"""A hash index of word n-grams that finds, in one compiled pass, the positions in a text at which
one may begin.

Words are the matches of `re.finditer(r"\\w+")` on the running Python, lower-cased. Each is hashed
character by character, a run of words by a rolling polynomial, all modulo 2**64 (Karp and Rabin
1987). Equal n-grams have equal hashes, so none is missed; different ones may have equal hashes too,
so the caller compares the words.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from mlm_repro.lineage.loops import compiled

WORD = re.compile(r"\w+")
CHUNK_CHARACTERS = 1 << 16
BATCH_TEXTS = 1 << 12
FILTER_BITS_PER_NGRAM = 16
PRIME = np.uint64(0x100000001B3)
RADIX = np.uint64(0x9E3779B97F4A7C15)
ZERO, ONE, SIX, HALF, LOW_SIX = (np.uint64(number) for number in (0, 1, 6, 32, 63))
Codes = NDArray[np.uint8] | NDArray[np.uint32]
Numbers = NDArray[np.uint64]
HASHES = 0
"""Row of the array from `_word_arrays` that has the hash of each word."""
STARTS = 1
"""Row of the array from `_word_arrays` that has the position of each word in the text, in
characters."""
MATCHES = 2
"""Row of the array from `_word_arrays` that has the positions in the text, in characters, of the
runs of words that the index has."""


class NgramIndex:
    """A hash index of every run of `words` words in `texts`, which takes about 20 to 40 bytes for
    each run. The method `candidates` yields, in ascending order, the character positions in another
    text, in upper or lower case, where one of these runs may begin: all matches, and perhaps other
    positions, so that the caller compares the words.

    Each of `texts` consists of at least `words` lower-cased words, joined by one space. Raises
    ValueError if this Python lower-cases in a way the index does not know.
    """

    def __init__(self, texts: Sequence[str], words: int) -> None:
        self._words = words
        self._fold = fold_table()
        hashes = np.concatenate([np.empty(0, np.uint64), *self._hashes(texts)])
        self._filter = np.zeros(_power_of_two(len(hashes) * FILTER_BITS_PER_NGRAM) // 64, np.uint64)
        self._table = np.zeros(_power_of_two(len(hashes) * 2), np.uint64)
        _fill(hashes, self._filter, self._table)

    def candidates(self, text: str) -> Iterator[int]:
        """Yield, in ascending order, the character positions of those words of `text` at which an
        n-gram of the index might begin. Every match begins at such a position.

        The text is read in chunks: memory beyond the text's own is constant.
        """
        word_rows = _word_arrays(min(len(text), CHUNK_CHARACTERS) + 1, self._words)
        word_rows[STARTS, 0] = 0
        count = 0
        within_word = False
        for origin in range(0, len(text), CHUNK_CHARACTERS):
            chunk = text[origin : origin + CHUNK_CHARACTERS]
            if origin + CHUNK_CHARACTERS >= len(text):
                chunk += " "
            codes = _code_points(chunk)
            count, within_word, matches = _search(
                codes,
                origin,
                self._fold,
                word_rows,
                count,
                within_word,
                self._words,
                self._filter,
                self._table,
            )
            yield from word_rows[MATCHES, :matches].tolist()
            again = min(count, self._words - 1)
            word_rows[:, : again + 1] = word_rows[:, count - again : count + 1]
            count = again

    def _hashes(self, texts: Sequence[str]) -> Iterator[Numbers]:
        """Yield uint64 arrays, one for each batch of BATCH_TEXTS texts, in order; the last batch
        may be smaller. `texts` is a flat sequence of texts of the form that the class asks for. An
        array has the hash of each run of `words` words that lies within a text, in order,
        repetitions included."""
        for first in range(0, len(texts), BATCH_TEXTS):
            batch = texts[first : first + BATCH_TEXTS]
            codes = _code_points(re.sub(r"[^\w ]", "", " ".join(batch)) + " ")
            word_rows = _word_arrays(len(codes), self._words)
            count, _ = _hash_words(codes, 0, self._fold, word_rows, 0, False)
            lengths = [text.count(" ") + 1 for text in batch]
            owner = np.repeat(np.arange(len(batch)), lengths)
            runs = count - self._words + 1
            total = np.zeros(runs, np.uint64)
            for offset in range(self._words):
                total = total * RADIX + word_rows[HASHES, offset : offset + runs]
            yield total[owner[:runs] == owner[self._words - 1 :]]


@cache
def fold_table() -> NDArray[np.uint32]:
    """Return a table [0x110000] in uint32 that maps each code point to the first code point of its
    lower case, or to 0 if it is not part of words.

    Words that are equal in lower case are equal after this mapping: the three sigmas are mapped to
    one, because which small sigma a capital becomes depends on its position, and only U+0130 has a
    second code point in lower case, which is not part of words. Raises ValueError if this does not
    hold for the running Python.
    """
    characters = (
        np.arange(sys.maxunicode + 1, dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")
    )
    members = list(chain.from_iterable(range(*run.span()) for run in WORD.finditer(characters)))
    lower = [chr(code).lower() for code in members]
    fold = np.zeros(len(characters), np.uint32)
    fold[members] = [ord(letter[0]) for letter in lower]
    fold[ord("ς")] = ord("σ")
    if (fold[fold[members]] != fold[members]).any() or any(
        WORD.search(letter, 1) for letter in lower
    ):
        raise ValueError(
            "the search for test sets cannot run on this Python, in whose Unicode data a"
            " lower-case letter has another lower case, or a letter's lower case is several"
            " letters: use another version of Python"
        )
    return fold


def _code_points(text: str) -> Codes:
    if text.isascii():
        return np.frombuffer(text.encode("ascii"), np.uint8)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.dtype("<u4"))


def _power_of_two(least: int) -> int:
    return 1 << max(6, (least - 1).bit_length())


def _word_arrays(characters: int, words: int) -> Numbers:
    """Return an uninitialised uint64 array, [3, entries], whose rows are HASHES, STARTS and
    MATCHES, with room for the words of a chunk of `characters`, the last `words` words before it,
    and an unfinished word."""
    return np.empty((3, characters // 2 + words + 2), np.uint64)


@compiled
def _hash_words(
    codes: Codes,
    origin: int,
    fold: NDArray[np.uint32],
    word_rows: Numbers,
    count: int,
    within_word: bool,
) -> tuple[int, bool]:
    """Append the hashes and positions of the complete words of `codes`, the code points of a chunk
    of a text, to `word_rows`, which has `count` words; the unfinished last word follows them.
    `origin` is the chunk's position in the text, `fold` the table of `fold_table`, and
    `within_word` is True if the chunk before ended inside of a word. Returns the new number of
    complete words, and whether the chunk ends inside of a word.

    The loop has no branches, because a processor cannot predict where words end: every character
    writes its word again, and the end of a word moves on to the next entry.
    """
    hashes = word_rows[HASHES]
    starts = word_rows[STARTS]
    value = hashes[count] if within_word else ZERO
    start = starts[count]
    for index in range(len(codes)):
        letter = np.uint64(fold[codes[index]])
        hashes[count] = value ^ (value >> HALF)
        starts[count] = start
        inside = letter != 0
        count += within_word & (not inside)
        start = start if inside else np.uint64(origin + index + 1)
        value = (value ^ letter) * (PRIME if inside else ZERO)
        within_word = inside
    hashes[count] = value
    starts[count] = start
    return count, within_word


@compiled
def _scramble(value: np.uint64) -> np.uint64:
    """Return the key under which the index stores the hash `value`; it is never 0, and its high
    bits depend on all of the hash."""
    return ((value ^ (value >> HALF)) * RADIX) | ONE


@compiled
def _find_key(key: np.uint64, table: Numbers) -> np.uint64:
    """Return the slot of a key, which is not 0, in a hash table with open addressing or, if the
    table lacks it, the free slot that it would take. The table has a power of two of slots; a free
    one has 0, and at least one must be free."""
    last = np.uint64(len(table) - 1)
    slot = (key >> HALF) & last
    while table[slot] != 0 and table[slot] != key:
        slot = (slot + ONE) & last
    return slot


@compiled
def _fill(hashes: Numbers, filter_bits: Numbers, table: Numbers) -> None:
    last_bit = np.uint64(len(filter_bits) * 64 - 1)
    for value in hashes:
        key = _scramble(value)
        table[_find_key(key, table)] = key
        bit = (key >> HALF) & last_bit
        filter_bits[bit >> SIX] |= ONE << (bit & LOW_SIX)


@compiled
def _search(
    codes: Codes,
    origin: int,
    fold: NDArray[np.uint32],
    word_rows: Numbers,
    count: int,
    within_word: bool,
    words: int,
    filter_bits: Numbers,
    table: Numbers,
) -> tuple[int, bool, int]:
    """Append the hashes and positions of the complete words of `codes` to `word_rows`, which has
    `count` words; `origin`, `fold` and `within_word` are as `_hash_words` takes them. Look up every
    run of `words` words in `word_rows` in the index, its `filter_bits` and its `table`, and write
    to the row MATCHES, from its start, the positions in the text at which the runs that are found
    begin. Returns the new number of complete words, whether the chunk ends inside of a word, and
    the number of matches. Before the next chunk the caller moves the last `words` − 1 words and the
    unfinished one to the start of the rows, so that no run is found twice."""
    count, within_word = _hash_words(codes, origin, fold, word_rows, count, within_word)
    hashes = word_rows[HASHES]
    last_bit = np.uint64(len(filter_bits) * 64 - 1)
    oldest = ONE
    for _ in range(words):
        oldest *= RADIX
    matches = 0
    run = np.uint64(0)
    for index in range(count):
        run = run * RADIX + hashes[index]
        if index >= words:
            run -= hashes[index - words] * oldest
        if index >= words - 1:
            key = _scramble(run)
            bit = (key >> HALF) & last_bit
            if (filter_bits[bit >> SIX] >> (bit & LOW_SIX)) & ONE and table[
                _find_key(key, table)
            ] == key:
                word_rows[MATCHES, matches] = word_rows[STARTS, index - words + 1]
                matches += 1
    return count, within_word, matches
