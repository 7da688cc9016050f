"""Words and n-grams of words, and the search for n-grams in a text."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice

from data_pipeline.fast.exact import checked
from data_pipeline.fast.ngram_index import WORD, NgramIndex


@dataclass(frozen=True)
class Ngrams:
    """A set of n-grams of several lengths; words are runs of `\\w`, lower-cased and joined by one space."""

    ngrams: frozenset[str]
    lengths: tuple[int, ...]
    """Lengths in words, longest first."""

    @classmethod
    def of(cls, ngrams: Iterable[str]) -> "Ngrams":
        """The n-grams with their lengths."""
        members = frozenset(ngrams)
        return cls(members, tuple(sorted({ngram.count(" ") + 1 for ngram in members}, reverse=True)))

    def matches(self, text: str) -> Iterator[tuple[int, str]]:
        """Character position and n-gram of each match: from left to right, at one place the longest first."""
        return _search()((self, text)) if self.ngrams else iter(())

    @cached_property
    def prefixes(self) -> frozenset[str]:
        """The first words of every n-gram, as many as the shortest has."""
        return frozenset(self._prefixes())

    @cached_property
    def index(self) -> NgramIndex:
        """The index of the prefixes."""
        return NgramIndex(self._prefixes(), self.lengths[-1])

    def of_words(self, words: list[str]) -> Iterator[str]:
        """The n-grams, longest first, with which the words begin."""
        for length in self.lengths:
            if length <= len(words) and (ngram := " ".join(words[:length])) in self.ngrams:
                yield ngram

    def _prefixes(self) -> Iterator[str]:
        shortest = self.lengths[-1]
        return (" ".join(ngram.split(" ", shortest)[:shortest]) for ngram in self.ngrams)


def ngrams_of(text: str, words: int, min_words: int) -> list[str]:
    """Every run of `words` words; a shorter text of at least `min_words` is one n-gram as a whole."""
    tokens = [word.lower() for word in WORD.findall(text)]
    if len(tokens) < min_words:
        return []
    length = min(words, len(tokens))
    return [" ".join(tokens[start : start + length]) for start in range(len(tokens) - length + 1)]


Search = Callable[[tuple[Ngrams, str]], Iterator[tuple[int, str]]]


def reference_search(sought: tuple[Ngrams, str]) -> Iterator[tuple[int, str]]:
    """`Ngrams.matches` by sets of strings alone."""
    ngrams, text = sought
    spans = list(WORD.finditer(text))
    words = [span.group().lower() for span in spans]
    longest, shortest = ngrams.lengths[0], ngrams.lengths[-1]
    for start in range(len(words) - shortest + 1):
        if " ".join(words[start : start + shortest]) in ngrams.prefixes:
            for ngram in ngrams.of_words(words[start : start + longest]):
                yield spans[start].start(), ngram


def indexed_search(sought: tuple[Ngrams, str]) -> Iterator[tuple[int, str]]:
    """`Ngrams.matches` by the index, every place it names compared word by word."""
    ngrams, text = sought
    for start in ngrams.index.candidates(text):
        words = [word.group().lower() for word in islice(WORD.finditer(text, start), ngrams.lengths[0])]
        for ngram in ngrams.of_words(words):
            yield start, ngram


@cache
def _search() -> Search:
    return checked(
        "n-gram search", lambda: indexed_search, reference_search, _samples(), lambda a, b: list(a) == list(b)
    )


def _samples() -> Iterator[tuple[Ngrams, str]]:
    passages = (
        "It was the best of times; it was the WORST of times, it was the age of wisdom",
        "ΟΔΟΣ Οδός ὈΔΥΣΣΕΎΣ σας ΣΑΣ İstanbul ISTANBUL Straße STRASSE ﬁn Ⅷ snake_case x² ٣٤ 12,000",
        "नमस्ते दुनिया का e\u0301te\u0301 日本語 テキスト \ud800 lone \U0001d400\U0001d401 \U00010400 𐐨 ǅ ǆ",
    )
    for words in (1, 3):
        ngrams = Ngrams.of(
            ngram for passage in passages for ngram in (*ngrams_of(passage, words, 1), *ngrams_of(passage, 8, 5))
        )
        for passage in passages:
            for before in ("", passage.swapcase(), f"{passage[::-1]}.{passage.upper()}", "-" * 65_516):
                yield ngrams, f"{before} {passage}"
