"""Removal of test-set text (Megatron-LM tools/openwebtext/filter_ngrams.py).

A document is cut where it shares an n-gram of words with a test set; what remains on either side, at a distance and
from sentence to sentence, is kept if it is long enough.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from data_pipeline.document import Document, Drop

WORD = re.compile(r"\w+")
SENTENCE_END = ".!?"


@dataclass(frozen=True)
class Ngrams:
    """A set of n-grams of several lengths; words are lower-cased and joined by one space."""

    ngrams: Collection[str]
    lengths: tuple[int, ...]
    """Lengths in words, longest first."""
    prefixes: frozenset[str]
    """The first words, as many as the shortest n-gram has, of every n-gram."""

    @classmethod
    def of(cls, ngrams: Iterable[str]) -> "Ngrams":
        """The n-grams with their lengths, longest first."""
        found = frozenset(ngrams)
        lengths = tuple(sorted({ngram.count(" ") + 1 for ngram in found}, reverse=True))
        shortest = lengths[-1] if lengths else 0
        return cls(found, lengths, frozenset(" ".join(ngram.split(" ")[:shortest]) for ngram in found))

    def matches(self, text: str) -> Iterator[tuple[int, str]]:
        """Character position and n-gram of each match, from left to right."""
        if not self.lengths:
            return
        spans = list(WORD.finditer(text))
        words = [span.group().lower() for span in spans]
        shortest = self.lengths[-1]
        for start in range(len(words) - shortest + 1):
            if " ".join(words[start : start + shortest]) not in self.prefixes:
                continue
            for length in self.lengths:
                ngram = " ".join(words[start : start + length])
                if start + length <= len(words) and ngram in self.ngrams:
                    yield spans[start].start(), ngram


def task_ngrams(texts: Iterable[str], words: int = 13, min_words: int = 8) -> Ngrams:
    """Every run of `words` words of each text; a shorter text of at least `min_words` is one n-gram as a whole."""
    found: set[str] = set()
    for text in texts:
        tokens = [word.lower() for word in WORD.findall(text)]
        if len(tokens) >= min_words:
            length = min(words, len(tokens))
            found.update(" ".join(tokens[i : i + length]) for i in range(len(tokens) - length + 1))
    return Ngrams.of(found)


def read_task_texts(path: Path) -> list[str]:
    """The passages of a test-set file: `text` of each JSON line, or each line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines] if path.suffix == ".jsonl" else lines


def count_matches(text: str, paths: tuple[Path, ...], words: int, min_words: int) -> Counter[str]:
    """How often each n-gram of the test-set files occurs in the text."""
    return Counter(ngram for _, ngram in _ngrams_of_files(paths, words, min_words).matches(text))


@lru_cache(maxsize=1)
def _ngrams_of_files(paths: tuple[Path, ...], words: int, min_words: int) -> Ngrams:
    return task_ngrams((text for path in paths for text in read_task_texts(path)), words, min_words)


def split_and_keep(text: str, ngrams: Ngrams, margin: int = 200, min_part: int = 200) -> list[str]:
    """The parts of the text that are left when the matches are cut out; `[text]` if there is no match.

    At the first match, the left part ends with the last sentence end at least `margin` characters before it, and the
    right part starts after the first sentence end at least `margin` characters behind it; a part is kept if it is
    longer than `min_part` characters, and the right part is searched again.
    """
    parts: list[str] = []
    rest = text
    while match := next(ngrams.matches(rest), None):
        start, ngram = match
        left = start - margin
        while left > 0 and rest[left] not in SENTENCE_END:
            left -= 1
        right = start + len(ngram) + margin
        while right < len(rest) and rest[right] not in SENTENCE_END:
            right += 1
        if left > 0 and left + 1 > min_part:
            parts.append(rest[: left + 1])
        rest = rest[right + 1 :]
        if len(rest) <= min_part:
            return parts
    return [*parts, rest]


def decontaminate(
    document: Document, ngrams: Ngrams, margin: int = 200, min_part: int = 200, max_parts: int = 10
) -> list[Document] | Drop:
    """The document's clean parts, numbered in their ids; itself if it has no match."""
    parts = split_and_keep(document.text, ngrams, margin, min_part)
    if parts == [document.text]:
        return [document]
    if not parts:
        return Drop("test-set text")
    if len(parts) > max_parts:
        return Drop(f"test-set text in more than {max_parts} parts")
    return [Document(f"{document.id}#{number}", part) for number, part in enumerate(parts)]
