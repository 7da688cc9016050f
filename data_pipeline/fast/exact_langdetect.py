"""langdetect 1.0.9 with seed 0 as compiled loops over arrays: the same language and the same bits of probability.

A text becomes an array of character classes (characters that langdetect normalises to the same one share a class, and
so do characters in no profile). An n-gram is a number made of classes, and a table leads from it to its row of
probabilities. The random draws are those of Python's generator, and sums are in langdetect's order.
"""

import math
import random
import string
import sys
from collections.abc import Callable
from importlib.metadata import version
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
Places = NDArray[np.int64]
Rows = NDArray[np.int32]
Classes = NDArray[np.uint16]
Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]
Detection = tuple[str | None, tuple[float, ...]]
"""A language (None for a text without features) and the probability of each language, in order of the profiles."""

SUPPORTED = "1.0.9"
TRIALS = 7
PADDED = 56
"""Columns of a row of probabilities: 55 languages and a zero that fills a vector register."""

NOTHING, SPACE, LOWER, UPPER = range(4)
"""Classes: before the first character of a short n-gram; a space; a character in no profile, by `str.isupper`."""
DENSE = 64
"""Classes below this (those, and A-Z and a-z) have a table of their own, which stays in the processor's cache."""
SLOTS_LOG2 = 18
ABSENT = -(1 << 31)
ONE = np.uint64(1)


def tables_of(factory: DetectorFactory) -> dict[str, NDArray[Any]]:
    """The tables of `fast_detect` for the factory's profiles; of the probabilities, those that are not 0."""
    chances = np.zeros((len(factory.word_lang_prob_map), PADDED))
    chances[:, : len(factory.langlist)] = list(factory.word_lang_prob_map.values())
    (classes, upper), (known, dense, keys, rows) = _character_classes(factory), _gram_tables(factory)
    return {
        "languages": np.array(factory.langlist), "classes": classes, "upper": upper, "known": known, "dense": dense,
        "keys": keys, "rows": rows, "shape": np.array(chances.shape), "places": np.flatnonzero(chances),
        "chances": chances[chances != 0],
    }  # fmt: skip


def fast_detect(tables: dict[str, NDArray[Any]]) -> Callable[[str], Detection]:
    """A function equal to langdetect's detection with seed 0 and the profiles that the tables are of.

    Raises RuntimeError if langdetect is not the version that this was derived from.
    """
    languages = tables["languages"].tolist()
    if version("langdetect") != SUPPORTED or len(languages) >= PADDED:
        raise RuntimeError(f"langdetect {version('langdetect')} is not {SUPPORTED} with its {PADDED - 1} profiles")
    probabilities = np.zeros(tables["shape"])
    probabilities.flat[tables["places"]] = tables["chances"]
    looked_up = [tables[name] for name in ("classes", "upper", "known", "dense", "keys", "rows")]
    given = (*looked_up, probabilities, _draws(), len(languages), sys.version_info >= (3, 12))

    def detect(text: str) -> Detection:
        characters = np.frombuffer(without_addresses(text).encode("utf-32-le", "surrogatepass"), np.uint32)
        likely = _probabilities(characters, *given)
        if not likely.size:
            return None, ()
        best = int(likely.argmax())
        language = languages[best] if likely[best] > Detector.PROB_THRESHOLD else Detector.UNKNOWN_LANG
        return language, tuple(likely.tolist())

    call_first(_probabilities, np.frombuffer(bytes(4), np.uint32), *given)
    return detect


def _letters(factory: DetectorFactory) -> dict[str, int]:
    """The class of each character in a profile; ASCII letters first."""
    letters = sorted({letter for word in factory.word_lang_prob_map for letter in word} - {" "})
    return {" ": SPACE} | {letter: number for number, letter in enumerate(letters, UPPER + 1)}


def _character_classes(factory: DetectorFactory) -> tuple[Classes, Flags]:
    """The class of each code point after normalisation, and whether a class is of upper case.

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


def _gram_tables(factory: DetectorFactory) -> tuple[Words, Rows, Places, Rows]:
    """Tables from n-grams to rows of probabilities: a dense one, and open addressing (keys, rows) for all others.

    Bit `third` of word `first * DENSE + second` is set if the dense table has the n-gram. langdetect begins anew at a
    space, so it looks up no n-gram with one in the middle, nor two spaces.
    """
    letters = _letters(factory)
    known, dense = np.zeros(DENSE**2, np.uint64), np.full(DENSE**3, -1, np.int32)
    keys = np.full(1 << SLOTS_LOG2, -1, np.int64)
    rows = np.full(1 << SLOTS_LOG2, -1, np.int32)
    for row, word in enumerate(factory.word_lang_prob_map):
        if not 1 <= len(word) <= NGram.N_GRAM or word in (" ", "  ") or word[1:-1] == " ":
            continue
        first, second, third = [NOTHING] * (NGram.N_GRAM - len(word)) + [letters[letter] for letter in word]
        if max(first, second, third) < DENSE:
            dense[(first * DENSE + second) * DENSE + third] = row
            known[first * DENSE + second] |= np.uint64(1 << third)
            continue
        key = (first << 32) | (second << 16) | third
        slot = ((key * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF) >> (64 - SLOTS_LOG2)
        while keys[slot] >= 0:
            slot = (slot + 1) & (len(keys) - 1)
        keys[slot], rows[slot] = key, row
    return known, dense, keys, rows


def _draws() -> Bytes4:
    """Outputs of Python's generator with seed 0, as many as a detection can use.

    A draw below n from n.bit_length() bits is accepted at the latest when the highest bit is 0; a trial draws for its
    first 1,001 n-grams at most, and every second trial takes four outputs for its two Gaussians.
    """
    generator = random.Random(0)
    draws: list[int] = []
    accepted = TRIALS * (Detector.ITERATION_LIMIT + 1) + 4 * TRIALS
    while accepted:
        draws.append(generator.getrandbits(32))
        accepted -= draws[-1] < 1 << 31
    return np.array(draws, np.uint32)


@compiled
def _lookup(gram: tuple[int, int, int], known: Words, keys: Places, rows: Rows) -> int:
    """Place of an n-gram in the dense table, or -1 - its row in the other, or ABSENT."""
    first, second, third = gram
    if max(first, second, third) < DENSE:
        place = first * DENSE + second
        return place * DENSE + third if known[place] >> np.uint64(third) & ONE else ABSENT
    key = (first << 32) | (second << 16) | third
    slot = np.int64((np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - SLOTS_LOG2))
    while keys[slot] >= 0:
        if keys[slot] == key:
            return -1 - rows[slot]
        slot = (slot + 1) & (len(keys) - 1)
    return ABSENT


@compiled
def _features(characters: Bytes4, classes: Classes, upper: Flags, known: Words, keys: Places, rows: Rows) -> Rows:
    """The text's n-grams (`append`, `cleaning_text` and `_extract_ngrams` of langdetect's Detector), as `_lookup`.

    Few of them are drawn, so the dense table is read for those alone. A bit tells if it has an n-gram; one that it does
    not have is overwritten by the next.

    langdetect means to count Latin Extended Additional as Latin and does not: it compares a number with a name.
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

    features = np.empty(3 * length + 3, np.int32)
    count: Any = 0
    first = second = np.int64(SPACE)
    for place in range(length):
        character = text[place]
        if latin_is_dropped and 65 <= character <= 122:
            continue
        third = np.int64(classes[character])
        if not (upper[second] and upper[third]):
            if max(first, second, third) < DENSE:
                bit = np.uint64(third)
                features[count] = third
                count += np.int64(known[0] >> bit & ONE)
                features[count] = second * DENSE + third
                count += np.int64(known[second] >> bit & ONE)
                features[count] = (first * DENSE + second) * DENSE + third
                count += np.int64(known[first * DENSE + second] >> bit & ONE)
            else:
                grams = ((NOTHING, NOTHING, third), (NOTHING, second, third), (first, second, third))
                for number in range(1 if third == SPACE else 0, 2 if second == SPACE else 3):
                    features[count] = _lookup(grams[number], known, keys, rows)
                    count += features[count] != ABSENT
        first, second = second, third
    return features[:count]


@compiled
def _sum(values: Floats, count: int, compensated: bool) -> float:
    """The first `count` values added as `sum()` adds floats: from Python 3.12 on with Neumaier's compensation."""
    total = compensation = 0.0
    for j in range(count):
        value = values[j]
        new = total + value
        if compensated:
            compensation += (total - new) + value if abs(total) >= abs(value) else (value - new) + total
        total = new
    return total + compensation


@compiled
def _probabilities(
    characters: Bytes4, classes: Classes, upper: Flags, known: Words, dense: Rows, keys: Places, rows: Rows,
    probabilities: Floats, draws: Bytes4, languages: int, compensated: bool,
) -> Floats:  # fmt: skip
    """Probability of each language (`Detector._detect_block`); empty for a text without features."""
    features = _features(characters, classes, upper, known, keys, rows)
    mean = np.zeros(PADDED)
    if len(features) == 0:
        return mean[:0]
    bits = 0
    while len(features) >> bits:
        bits += 1
    shift = np.uint32(32 - bits)
    place = 0
    spare = 0.0
    current = np.empty(PADDED)
    for trial in range(TRIALS):
        if trial % 2 == 0:
            x = ((draws[place] >> 5) * 67108864.0 + (draws[place + 1] >> 6)) * (1.0 / 9007199254740992.0)
            y = ((draws[place + 2] >> 5) * 67108864.0 + (draws[place + 3] >> 6)) * (1.0 / 9007199254740992.0)
            place += 4
            radius = math.sqrt(-2.0 * math.log(1.0 - y))
            gauss, spare = math.cos(x * (2.0 * math.pi)) * radius, math.sin(x * (2.0 * math.pi)) * radius
        else:
            gauss = spare
        weight = (0.5 + gauss * 0.05) / 10000
        current[:] = 1.0 / languages
        current[languages:] = 0.0
        step = 0
        while True:
            choice = draws[place] >> shift
            place += 1
            while choice >= len(features):
                choice = draws[place] >> shift
                place += 1
            feature = features[choice]
            row = probabilities[dense[feature] if feature >= 0 else -1 - feature]
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


MAX_LENGTH = 10_000
"""Characters that langdetect examines, counted after addresses are removed."""
LOOKAHEAD = 3_000
"""More than a URL, a mail address and a Vietnamese pair together can be: 8 + 2076, 64 + 1 + 255 + 255, and 2."""
MAILBOX, LONGEST_MAILBOX = string.ascii_letters + string.digits + "-_.", 64
"""Characters that `Detector.MAIL_RE` accepts before the "@", and their largest number."""


def without_addresses(text: str) -> str:
    """The text that `Detector.append` examines, before it merges spaces. A long text is read only as far as needed."""
    size = 2 * MAX_LENGTH
    while True:
        head = text[:size]
        if "http" in head:
            head = Detector.URL_RE.sub(" ", head)
        head = _without_mail(head)
        if size >= len(text) or len(head) >= MAX_LENGTH + LOOKAHEAD:
            break
        size *= 2
    if not head.isascii() and any(mark in head for mark in NGram.DMARK_CLASS):
        head = NGram.normalize_vi(head)
    return head[:MAX_LENGTH]


def _without_mail(text: str) -> str:
    """`MAIL_RE.sub(" ", text)`, tried only where letters lead to an "@"; the expression itself tries every word."""
    parts: list[str] = []
    done, at = 0, text.find("@")
    while at >= 0:
        before = max(done, at - LONGEST_MAILBOX)
        start = before + len(text[before:at].rstrip(MAILBOX))
        if start < at and (address := Detector.MAIL_RE.match(text, start)):
            parts += (text[done:start], " ")
            done = address.end()
        at = text.find("@", max(done, at + 1))
    return "".join((*parts, text[done:])) if parts else text
