"""langdetect 1.0.9 with seed 0 as compiled loops over arrays: the same language and the same bits
of probability.

A text becomes an array of character classes (characters that langdetect normalises to the same one
share a class, and so do characters in no profile). An n-gram is a number made of classes, and a
table leads from it to its row of probabilities. The table is large and few n-grams are drawn, so it
is read for those alone where bits, which stay in the processor's cache, tell which n-grams are
known. Random draws come from Python's generator, and sums are in langdetect's order.
"""

import math
import random
import re
import sys
from collections.abc import Callable
from importlib.metadata import version
from itertools import chain
from typing import Any

import numpy as np
from langdetect.detector import Detector
from langdetect.detector_factory import DetectorFactory
from langdetect.utils.ngram import NGram
from numpy.typing import NDArray

from mlm_repro.data_pipeline.fast.exact import LAST_LETTER
from mlm_repro.lineage.loops import call_first, compiled

Bytes4 = NDArray[np.uint32]
Words = NDArray[np.uint64]
Classes = NDArray[np.uint16]
Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]
Detection = tuple[str | None, tuple[float, ...]]
"""A pair: a language (None for a text without features), and the probability of each language in
the order of the profiles."""

SUPPORTED = "1.0.9"
TRIALS = 7
PADDED = 56
"""Columns of a row of probabilities: 55 languages and a zero that fills a vector register."""

NOTHING, SPACE, LOWER, UPPER = range(4)
"""Classes: the padding before the first character of a short n-gram; a space; a character in no
profile, lower-case or upper-case by `str.isupper`."""
DENSE = np.uint64(64)
"""Number of the first classes, A-Z and a-z among them, whose known n-grams are bits."""
SLOTS_LOG2 = 18
CLASS_BITS = np.uint64(15)
"""Bits of a class in the key of an n-gram, which is its three classes side by side."""
ROW_BITS = np.uint64(18)
"""Bits of a row of probabilities beside the key of an n-gram: together they fit 63 bits."""
ROW = np.uint64((1 << 18) - 1)
"""Bits of the row in an entry."""
FREE = np.uint64(0xFFFFFFFFFFFFFFFF)
"""Free entry in the table of n-grams."""
ONE = np.uint64(1)


def tables_of(factory: DetectorFactory) -> dict[str, NDArray[Any]]:
    """Return a dict name → array of the tables that `fast_detect`, the fast detection of languages,
    needs, computed from the profiles of langdetect's `factory`. Probabilities are stored sparsely:
    the values that are not 0, and their positions."""
    chances = np.zeros((len(factory.word_lang_prob_map), PADDED))
    chances[:, : len(factory.langlist)] = list(factory.word_lang_prob_map.values())
    classes, upper = _character_classes(factory)
    known, entries = _gram_tables(factory)
    return {
        "languages": np.array(factory.langlist),
        "classes": classes,
        "upper": upper,
        "known": known,
        "entries": entries,
        "shape": np.array(chances.shape),
        "places": np.flatnonzero(chances),
        "chances": chances[chances != 0],
    }


def fast_detect(tables: dict[str, NDArray[Any]]) -> Callable[[str], Detection]:
    """Return a function that detects a text's language as langdetect does with seed 0, bit for bit.
    It returns a pair: the language, "unknown" if none is likely, and a tuple of the probabilities
    in the order of the languages in `tables`, which `tables_of` gives; None and an empty tuple for
    a text without features.

    Raises RuntimeError if langdetect is not the version that this was derived from, or has more
    languages; detection then warns of it and goes on with langdetect itself.
    """
    languages = tables["languages"].tolist()
    if version("langdetect") != SUPPORTED or len(languages) >= PADDED:
        raise RuntimeError(
            f"fast detection of languages is written for langdetect {SUPPORTED} with at most"
            f" {PADDED - 1} languages, and langdetect {version('langdetect')} with {len(languages)}"
            " is installed"
        )
    probabilities = np.zeros(tables["shape"])
    probabilities.flat[tables["places"]] = tables["chances"]
    looked_up = [tables[name] for name in ("classes", "upper", "known", "entries")]
    given = (*looked_up, probabilities, _draws(), len(languages), sys.version_info >= (3, 12))

    def detect(text: str) -> Detection:
        characters = np.frombuffer(
            without_addresses(text).encode("utf-32-le", "surrogatepass"), np.uint32
        )
        likely = _probabilities(characters, *given)
        if not likely.size:
            return None, ()
        best = int(likely.argmax())
        language = (
            languages[best] if likely[best] > Detector.PROB_THRESHOLD else Detector.UNKNOWN_LANG
        )
        return language, tuple(likely.tolist())

    call_first(_probabilities, np.frombuffer(bytes(4), np.uint32), *given)
    return detect


def _letters(factory: DetectorFactory) -> dict[str, int]:
    """Return a dict from each character that occurs in a profile to its class: SPACE for a space,
    then UPPER + 1 and the numbers that follow, one for each other character in order of code
    point."""
    letters = sorted(set(chain.from_iterable(factory.word_lang_prob_map)) - {" "})
    return {" ": SPACE} | {letter: number for number, letter in enumerate(letters, UPPER + 1)}


def _character_classes(factory: DetectorFactory) -> tuple[Classes, Flags]:
    """Return two arrays: the class of each code point after langdetect's normalisation, [0x110000],
    and for each class True if it is upper-case, [classes]. A character of the profiles of `factory`
    has its class of `_letters`; another has UPPER if it is upper-case, else LOWER.

    langdetect normalises nothing outside the basic plane.
    """
    letters = _letters(factory)
    classes = np.full(sys.maxunicode + 1, LOWER, np.uint16)
    for code in range(LAST_LETTER + 1):
        letter = NGram.normalize(chr(code)) if code < 0x10000 else chr(code)
        if known := letters.get(letter):
            classes[code] = known
        elif letter.isupper():
            classes[code] = UPPER
    upper = np.zeros(max(letters.values()) + 1, np.bool_)
    upper[[UPPER, *(number for letter, number in letters.items() if letter.isupper())]] = True
    return classes, upper


def _gram_tables(factory: DetectorFactory) -> tuple[Words, Words]:
    """Return two arrays. The first has bits that tell which n-grams of the first DENSE classes are
    known: bit `third` of the word `first * DENSE + second`. The second is a hash table with open
    addressing from n-grams to rows of probabilities: an entry is the key of the n-gram and, in its
    last ROW_BITS bits, the row; a free one is FREE.

    langdetect begins anew at a space, so it looks up no n-gram with a space in the middle, nor two
    spaces.
    """
    letters = _letters(factory)
    known = np.zeros(int(DENSE) ** 2, np.uint64)
    entries = np.full(1 << SLOTS_LOG2, FREE)
    bits = int(CLASS_BITS)
    for row, word in enumerate(factory.word_lang_prob_map):
        if not 1 <= len(word) <= NGram.N_GRAM or word in (" ", "  ") or word[1:-1] == " ":
            continue
        first, second, third = [NOTHING] * (NGram.N_GRAM - len(word)) + [
            letters[letter] for letter in word
        ]
        if max(first, second, third) < DENSE:
            known[first * int(DENSE) + second] |= np.uint64(1 << third)
        key = (((first << bits) | second) << bits) | third
        slot = ((key * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF) >> (64 - SLOTS_LOG2)
        while entries[slot] != FREE:
            slot = (slot + 1) & (len(entries) - 1)
        entries[slot] = (key << int(ROW_BITS)) | row
    return known, entries


def _draws() -> Bytes4:
    """Return the first outputs, of 32 bits, of Python's random generator with seed 0, as many as a
    detection can use, [draws].

    A draw below n from n.bit_length() bits is accepted at the latest when the highest bit is 0; a
    trial draws for its first 1,001 n-grams at most, and every second trial takes four outputs for
    its two Gaussians.
    """
    generator = random.Random(0)
    draws = []
    accepted = TRIALS * (Detector.ITERATION_LIMIT + 1) + 4 * TRIALS
    while accepted:
        draws.append(generator.getrandbits(32))
        accepted -= draws[-1] < 1 << 31
    return np.array(draws, np.uint32)


@compiled
def _lookup(key: np.uint64, entries: Words) -> np.uint64:
    """Return the entry of the n-gram with this key in the hash table `entries`: a number that has
    the key in its high bits and the n-gram's row of probabilities in its last ROW_BITS bits, or
    FREE if no profile has the n-gram."""
    last = np.uint64(len(entries) - 1)
    slot = (key * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - SLOTS_LOG2)
    while entries[slot] != FREE and entries[slot] >> ROW_BITS != key:
        slot = (slot + ONE) & last
    return entries[slot]


@compiled
def _features(
    characters: Bytes4, classes: Classes, upper: Flags, known: Words, entries: Words
) -> Words:
    """Return the keys of a text's n-grams, of one to three characters, that a profile has,
    [n-grams], in order, repetitions included, as langdetect's Detector extracts them (`append`,
    `cleaning_text` and `_extract_ngrams`): spaces in a row are merged, and the characters from `A`
    to `z` are dropped if the characters from U+0300 on are more than twice as many.

    `characters` are the code points of a text from `without_addresses`. `classes`, by code point,
    and `upper`, by class, are the arrays of `_character_classes`; `known` and `entries` are the
    tables of `_gram_tables`.

    langdetect means to count Latin Extended Additional as Latin and does not: it compares a number
    with a name.
    """
    text = np.empty(len(characters), np.uint32)
    length = latin = other = 0
    previous = np.uint32(0)
    for character in characters:
        if character != 32 or previous != 32:
            text[length] = character
            length += 1
            if 65 <= character <= 122:
                latin += 1
            elif character >= 0x300:
                other += 1
        previous = character
    latin_is_dropped = latin * 2 < other

    # Numbers without a sign need no test whether they count from the end of an array.
    features = np.empty(3 * length + 3, np.uint64)
    count = np.uint64(0)
    nothing = np.uint64(NOTHING)
    first = second = np.uint64(SPACE)
    for position in range(length):
        character = text[position]
        if latin_is_dropped and 65 <= character <= 122:
            continue
        third = np.uint64(classes[character])
        if not (upper[second] and upper[third]):
            is_dense = max(first, second, third) < DENSE
            for before, middle in ((nothing, nothing), (nothing, second), (first, second)):
                # A key that is not counted is overwritten by the next, which needs no branch.
                features[count] = (((before << CLASS_BITS) | middle) << CLASS_BITS) | third
                if is_dense:
                    count += (known[before * DENSE + middle] >> third) & ONE
                else:
                    count += np.uint64(_lookup(features[count], entries) != FREE)
        first = second
        second = third
    return features[:count]


@compiled
def _sum(values: Floats, count: int, compensated: bool) -> float:
    """Return the sum of the first `count` values as Python's `sum()` adds floats: if `compensated`,
    with Neumaier's compensation, as from Python 3.12 on."""
    total = compensation = 0.0
    for j in range(count):
        value = values[j]
        new = total + value
        if compensated:
            compensation += (
                (total - new) + value if abs(total) >= abs(value) else (value - new) + total
            )
        total = new
    return total + compensation


@compiled
def _probabilities(
    characters: Bytes4,
    classes: Classes,
    upper: Flags,
    known: Words,
    entries: Words,
    probabilities: Floats,
    draws: Bytes4,
    languages: int,
    compensated: bool,
) -> Floats:
    """Return the probability of each of the `languages` languages, [languages], that langdetect's
    `Detector._detect_block` gives for the text with the code points `characters`; an empty array
    for a text without features. `draws` are the random numbers, and the other arrays the tables.
    `compensated` is True if this Python's `sum()` compensates, as from 3.12 on."""
    features = _features(characters, classes, upper, known, entries)
    mean = np.zeros(PADDED)
    if len(features) == 0:
        return mean[:0]
    bits = 0
    while len(features) >> bits:
        bits += 1
    shift = np.uint32(32 - bits)
    draw = 0
    spare = 0.0
    current = np.empty(PADDED)
    for trial in range(TRIALS):
        if trial % 2 == 0:
            x = ((draws[draw] >> 5) * 67108864.0 + (draws[draw + 1] >> 6)) * (
                1.0 / 9007199254740992.0
            )
            y = ((draws[draw + 2] >> 5) * 67108864.0 + (draws[draw + 3] >> 6)) * (
                1.0 / 9007199254740992.0
            )
            draw += 4
            radius = math.sqrt(-2.0 * math.log(1.0 - y))
            gauss = math.cos(x * (2.0 * math.pi)) * radius
            spare = math.sin(x * (2.0 * math.pi)) * radius
        else:
            gauss = spare
        weight = (0.5 + gauss * 0.05) / 10000
        current[:] = 1.0 / languages
        current[languages:] = 0.0
        step = 0
        while True:
            choice = draws[draw] >> shift
            draw += 1
            while choice >= len(features):
                choice = draws[draw] >> shift
                draw += 1
            row = probabilities[_lookup(features[choice], entries) & ROW]
            for j in range(PADDED):
                current[j] *= weight + row[j]
            if step % 5 == 0:
                total = _sum(current, languages, compensated)
                highest = 0.0
                for j in range(PADDED):
                    current[j] /= total
                    highest = max(highest, current[j])
                if highest > 0.99999 or step >= 1000:
                    break
            step += 1
        for j in range(PADDED):
            mean[j] += current[j] / TRIALS
    return mean[:languages]


AT = re.compile(r"@(?<=[-_.0-9a-zA-Z]@)[-_0-9a-zA-Z]")
"""Finds the middle of a mail address: an @ between two characters that `Detector.MAIL_RE` allows
beside it."""
MAX_LENGTH = 10_000
"""Number of characters, from the first on, that langdetect examines, counted after addresses are
removed."""
LOOKAHEAD = 3_000
"""Number of characters that are read beyond MAX_LENGTH: more than a URL (8 + 2076), a mail address
(64 + 1 + 255 + 255) and a Vietnamese pair of characters (2) together can have."""


def without_addresses(text: str) -> str:
    """Return the first MAX_LENGTH characters of a text after URLs and mail addresses became spaces
    and Vietnamese accents were composed, as `Detector.append` does before it merges spaces. A long
    text is read only as far as needed."""
    size = 2 * MAX_LENGTH
    while True:
        head = text[:size]
        if "http" in head:
            head = Detector.URL_RE.sub(" ", head)
        # The expression for addresses is slow, and no address goes beyond a line.
        if AT.search(head):
            lines = [
                Detector.MAIL_RE.sub(" ", line) if "@" in line else line
                for line in head.split("\n")
            ]
            head = "\n".join(lines)
        if size >= len(text) or len(head) >= MAX_LENGTH + LOOKAHEAD:
            break
        size *= 2
    if not head.isascii() and any(mark in head for mark in NGram.DMARK_CLASS):
        head = NGram.normalize_vi(head)
    return head[:MAX_LENGTH]
