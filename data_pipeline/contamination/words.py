"""Words and n-grams of words, and the search for n-grams in a text."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, islice

from mlm_repro.data_pipeline.fast.ngram_index import WORD, NgramIndex

TAG = r"<[^<>]{1,2000}>"
LINK = r"\]\([^()\s]{1,2000}\)"
MARK = re.compile(rf"\u00ad|{TAG}|{LINK}")
"""Matches the marks that do not hide a match with an n-gram: a soft hyphen, a tag, or the target of
a Markdown link with the brackets around it."""
SPACED = {
    (True, False): re.compile(TAG),
    (False, True): re.compile(LINK),
    (True, True): re.compile(f"{TAG}|{LINK}"),
}
"""Dict of the patterns of tags and link targets; a key is a pair, True if a text contains `<` and
True if it contains `](`. A text with neither has no pattern. A pattern of one kind matches faster
than a pattern of both."""


@dataclass(frozen=True)
class Ngrams:
    """All n-grams of `words` words in `texts`, each text given as lower-cased words joined by one
    space, where a text with fewer words is one n-gram as a whole; and the search for them in
    another text, which the method `matches` takes as it is written."""

    texts: tuple[str, ...]
    """Lower-cased words joined by one space, a word being a run of `\\w`. Each text has at least
    one word."""
    words: int

    @classmethod
    def of(cls, ngrams: Iterable[str]) -> "Ngrams":
        """Return an Ngrams that holds exactly `ngrams`, each lower-cased words joined by one space;
        they may have different lengths."""
        members = tuple(sorted(set(ngrams)))
        return cls(members, max((ngram.count(" ") + 1 for ngram in members), default=1))

    @cached_property
    def ngrams(self) -> frozenset[str]:
        """Frozenset of the n-grams of the texts, each as its words joined by one space. A text with
        fewer words than an n-gram is in the set as a whole."""
        runs = (runs_of(text.split(" "), self.words) for text in self.texts)
        return frozenset(chain.from_iterable(runs))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tuple of the distinct lengths, in words, of the n-grams, longest first; empty without
        texts."""
        return tuple(
            sorted({min(text.count(" ") + 1, self.words) for text in self.texts}, reverse=True)
        )

    def matches(self, text: str) -> Iterator[tuple[int, str]]:
        """Yield a pair for each match in `text`, from left to right: its character position in
        `text` and the n-gram, lower-cased words joined by one space. At one position the longest
        comes first.

        The case of letters and the signs between words do not matter. Soft hyphens, tags and the
        targets of links hide no match.
        """
        if not self.texts:
            return iter(())
        matches = self.search(text)
        spaced = SPACED.get(("<" in text, "](" in text))
        unmarked = (spaced.sub(" ", text) if spaced else text).replace("\u00ad", "")
        # Most texts have no marks and are searched once.
        if unmarked == text:
            return matches
        # With marks, both searches count: a mark interrupts a match in the text as it is.
        unmarked_matches = list(self.search(unmarked))
        if not unmarked_matches:
            return matches
        pieces = _without_marks(text)
        starts = [0, *accumulate(len(piece) for _, piece in pieces)]
        found_matches = {*matches}
        for position, ngram in unmarked_matches:
            piece = bisect_right(starts, position) - 1
            found_matches.add((pieces[piece][0] + position - starts[piece], ngram))
        return iter(sorted(found_matches, key=lambda match: (match[0], -len(match[1]))))

    @cached_property
    def index(self) -> NgramIndex:
        """An NgramIndex, a hash index, of every run of n words in the texts, where n is the length
        of the shortest n-gram. There must be at least one text."""
        return NgramIndex(self.texts, self.lengths[-1])

    def search(self, text: str) -> Iterator[tuple[int, str]]:
        """Yield a pair for each match in `text`, from left to right: its character position and the
        n-gram, lower-cased words joined by one space; at one position the longest comes first. A
        tag, a link's target or a soft hyphen within a match hides it here, unlike in `matches`.
        This object must have at least one text. The index proposes positions; the words there are
        compared."""
        for start in self.index.candidates(text):
            words = [
                word.group().lower() for word in islice(WORD.finditer(text, start), self.lengths[0])
            ]
            for length in self.lengths:
                if length <= len(words) and (ngram := " ".join(words[:length])) in self.ngrams:
                    yield start, ngram


def _without_marks(text: str) -> list[tuple[int, str]]:
    """Return the text as a list of pieces, each a pair of its character position in the original
    and its text. Soft hyphens are omitted; a tag or a link target becomes one space at the end of a
    piece."""
    pieces = []
    end = 0
    for mark in MARK.finditer(text):
        pieces.append((end, text[end : mark.start()] + " " * (mark.group() != "\u00ad")))
        end = mark.end()
    return [*pieces, (end, text[end:])]


def words_of(text: str) -> list[str]:
    """Return a list of the words of a text in order, lower-cased, repetitions included. A word is a
    run of letters, digits and underscores."""
    return [word.lower() for word in WORD.findall(text)]


def runs_of(words: list[str], length: int) -> list[str]:
    """Return a list of every run of `length` consecutive words in order, each as a text with spaces
    between the words. Fewer words than `length` are one run, and no word at all is one empty
    text."""
    length = min(length, len(words))
    return [" ".join(words[start : start + length]) for start in range(len(words) - length + 1)]
