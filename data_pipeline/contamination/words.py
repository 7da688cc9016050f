"""Words and n-grams of words, and the search for n-grams in a text."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice

from mlm_repro.data_pipeline.fast.ngram_index import WORD, NgramIndex

TAG = r"<[^<>]{1,2000}>"
LINK = r"\]\([^()\s]{1,2000}\)"
MARK = re.compile(rf"\u00ad|{TAG}|{LINK}")
"""A soft hyphen, a tag, or what follows the words of a link in Markdown."""
SPACED = {
    (True, False): re.compile(TAG),
    (False, True): re.compile(LINK),
    (True, True): re.compile(f"{TAG}|{LINK}"),
}
"""The marks that are read as spaces, by whether a text has `<` and `](`: one kind is found faster
than two."""


@dataclass(frozen=True)
class Ngrams:
    """Every run of so many words in texts; a shorter text is one n-gram as a whole."""

    texts: tuple[str, ...]
    """Words are runs of `\\w`, lower-cased and joined by one space; each text has at least one."""
    words: int

    @classmethod
    def of(cls, ngrams: Iterable[str]) -> "Ngrams":
        """Exactly these n-grams."""
        members = tuple(sorted(set(ngrams)))
        return cls(members, max((ngram.count(" ") + 1 for ngram in members), default=1))

    @cached_property
    def ngrams(self) -> frozenset[str]:
        """Distinct n-grams."""
        return frozenset(
            ngram for text in self.texts for ngram in runs_of(text.split(" "), self.words)
        )

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Lengths in words, longest first."""
        return tuple(
            sorted({min(text.count(" ") + 1, self.words) for text in self.texts}, reverse=True)
        )

    def matches(self, text: str) -> Iterator[tuple[int, str]]:
        """Character position and n-gram of each match, from left to right; the longest comes first
        at one place.

        Soft hyphens, tags and the targets of links hide no match.
        """
        if not self.texts:
            return iter(())
        here = self.search(text)
        spaced = SPACED.get(("<" in text, "](" in text))
        unmarked = (spaced.sub(" ", text) if spaced else text).replace("\u00ad", "")
        if unmarked == text or not (more := [*self.search(unmarked)]):
            return here
        parts = _without_marks(text)
        starts = [0, *accumulate(len(part) for _, part in parts)]
        places = {*here}
        for place, ngram in more:
            part = bisect_right(starts, place) - 1
            places.add((parts[part][0] + place - starts[part], ngram))
        return iter(sorted(places, key=lambda match: (match[0], -len(match[1]))))

    @cached_property
    def index(self) -> NgramIndex:
        """The index of all runs of as many words as the shortest n-gram has."""
        return NgramIndex(self.texts, self.lengths[-1])

    def search(self, text: str) -> Iterator[tuple[int, str]]:
        """`matches` of a text without marks: the words at every place that the index finds are
        compared."""
        for start in self.index.candidates(text):
            words = [
                word.group().lower() for word in islice(WORD.finditer(text, start), self.lengths[0])
            ]
            for length in self.lengths:
                if length <= len(words) and (ngram := " ".join(words[:length])) in self.ngrams:
                    yield start, ngram


def _without_marks(text: str) -> list[tuple[int, str]]:
    """The text in parts with the place of each: soft hyphens are left out, tags and targets of
    links are spaces."""
    parts, end = [], 0
    for mark in MARK.finditer(text):
        parts.append((end, text[end : mark.start()] + " " * (mark.group() != "\u00ad")))
        end = mark.end()
    return [*parts, (end, text[end:])]


def words_of(text: str) -> list[str]:
    """The words of a text, lower-cased."""
    return [word.lower() for word in WORD.findall(text)]


def runs_of(words: list[str], length: int) -> list[str]:
    """Every run of so many words; fewer are one run."""
    length = min(length, len(words))
    return [" ".join(words[start : start + length]) for start in range(len(words) - length + 1)]
