"""Removal of test-set text (Megatron-LM tools/openwebtext/filter_ngrams.py).

A document is cut where it shares an n-gram of words with a test set; what remains on either side, at a distance and
from sentence to sentence, is kept if it is long enough. What an n-gram of a test set is says `passages.py`.
"""

from collections import Counter
from pathlib import Path

from data_pipeline.contamination.passages import ngrams_of_files
from data_pipeline.contamination.words import Ngrams
from data_pipeline.document import Document, Drop

SENTENCE_END = ".!?"


def count_matches(text: str, paths: tuple[Path, ...], words: int, min_words: int) -> Counter[str]:
    """How often each n-gram of the test-set files occurs in the text."""
    return Counter(ngram for _, ngram in ngrams_of_files(paths, words, min_words).matches(text))


def split_and_keep(text: str, ngrams: Ngrams, margin: int = 200, min_part: int = 200) -> list[str]:
    """The parts of the text that are left when the matches are cut out; `[text]` if there is no match.

    At the first match, the left part ends with the last sentence end at least `margin` characters before it, and the
    right part starts after the first sentence end at least `margin` characters behind it; a part is kept if it is
    longer than `min_part` characters, and the right part is searched again. Time is linear in the text.
    """
    parts: list[str] = []
    begin = 0
    for start, ngram in ngrams.matches(text):
        if start < begin:
            continue
        left = start - margin
        while left > begin and text[left] not in SENTENCE_END:
            left -= 1
        right = start + len(ngram) + margin
        while right < len(text) and text[right] not in SENTENCE_END:
            right += 1
        if left > begin and left + 1 - begin > min_part:
            parts.append(text[begin : left + 1])
        begin = right + 1
        if len(text) - begin <= min_part:
            return parts
    return [*parts, text[begin:]]


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
