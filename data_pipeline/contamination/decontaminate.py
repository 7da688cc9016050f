"""Removal of test-set text (Megatron-LM tools/openwebtext/filter_ngrams.py).

A document is cut where it shares an n-gram of words with a test set. The text on either side of the
margin, from sentence to sentence, is kept if it is long enough.

WikiText's own marks do not hide a match with the text it was made from: `3 @-@ 4`, `10 @,@ 000` and
`Teddy 's` have the words of `3-4`, `10,000` and `Teddy's`. `<unk>` stands for one word outside
WikiText's vocabulary, which no other text has there, so a passage ends at it and another begins.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from pathlib import Path

from mlm_repro.data_pipeline.contamination.words import Ngrams, words_of
from mlm_repro.data_pipeline.document import Document, Drop
from mlm_repro.data_pipeline.reading.lines import parse_line
from mlm_repro.lineage.errors import BadInput, cause

SENTENCE_END = ".!?"


def split_and_keep(text: str, ngrams: Ngrams, margin: int = 200, min_part: int = 200) -> list[str]:
    """Return a list of the parts, in order, of the text that are left when its matches with
    `ngrams` are cut out; `[text]` if there is no match.

    At the first match, the left part ends with the last sentence end (`.`, `!` or `?`) at least
    `margin` characters before it, and the right part starts after the first sentence end at least
    `margin` characters behind it, where a match's length is the length of its words joined by one
    space. A part is kept if it is longer than `min_part` characters. The right part is searched in
    turn. `margin` and `min_part` are 200 by default. Time is linear in the text.
    """
    parts = []
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
    """Return a list of the document's clean parts, each a document with `#` and its number from 0
    appended to its id, or of the document itself if it has no match with `ngrams`.

    Returns a Drop if no part is left, or more than `max_parts`, by default 10, are. `margin`
    characters on each side of a match go too, onwards to the end of a sentence; a part is longer
    than `min_part` characters. Both are 200 by default.
    """
    parts = split_and_keep(document.text, ngrams, margin, min_part)
    if parts == [document.text]:
        return [document]
    if not parts:
        return Drop("test-set text")
    if len(parts) > max_parts:
        return Drop(f"test-set text in more than {max_parts} parts")
    return [
        replace(document, id=f"{document.id}#{number}", text=part)
        for number, part in enumerate(parts)
    ]


UNKNOWN_WORD = "<unk>"
WIKITEXT_SUFFIX = ".tokens"
WIKITEXT_TITLE = re.compile(r" = [^=].*[^=] = ")


def read_documents(path: Path) -> list[list[str]]:
    """Return a list of the documents of a test-set file, each a list of its passages, which are
    texts.

    A document is the `text` of a line of a `.jsonl` file, an article of WikiText's `.tokens`, whose
    lines are its passages, or a line of any other file. Blank lines are left out. Every passage is
    divided at `<unk>`. Raises BadInput if the file cannot be read, or if a line of a `.jsonl` file
    has no `text`.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"the test set {path} cannot be read as UTF-8 text: {cause(error)}; put a"
            " readable copy of it, in UTF-8, in its place"
        ) from error
    if path.suffix == ".jsonl":
        grouped = [
            [_text(path, number, line)] for number, line in enumerate(lines, 1) if line.strip()
        ]
    elif path.suffix == WIKITEXT_SUFFIX:
        grouped = list(_articles(lines))
    else:
        grouped = [[line] for line in lines if line.strip()]
    # No passage crosses an unknown word or the end of a line.
    return [
        list(chain.from_iterable(line.split(UNKNOWN_WORD) for line in group)) for group in grouped
    ]


@lru_cache(maxsize=2)
def ngrams_of_files(paths: tuple[Path, ...], words: int, min_words: int) -> Ngrams:
    """Return an `Ngrams` with the n-grams, of `words` words, of every passage of the test-set files
    that has at least `min_words` words; a passage of fewer than `words` is one n-gram. Raises
    BadInput if a file cannot be read, or if a line of a `.jsonl` file has no `text`. The two last
    results are cached."""
    documents = chain.from_iterable(map(read_documents, paths))
    passages = map(words_of, chain.from_iterable(documents))
    return Ngrams(
        tuple(" ".join(passage) for passage in passages if len(passage) >= max(1, min_words)), words
    )


def _text(path: Path, number: int, line: str) -> str:
    """Return the string `text` of the JSON object in `line`. Raises BadInput, which names the file
    `path` and the line's `number`, if the line has no such string."""
    try:
        record = parse_line(line.encode("utf-8"))
    except ValueError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise BadInput(
            f"the test set {path}, line {number}, is not a JSON object with a string `text`, as"
            " each line of a .jsonl test set must be"
        )
    return str(record["text"])


def _articles(lines: list[str]) -> Iterator[list[str]]:
    """Yield each article in the lines of a WikiText file as the list of its non-empty lines, its
    title first. Lines before the first title are an article too.

    A formula may look like a title, but has no empty lines around it.
    """
    article: list[str] = []
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        if WIKITEXT_TITLE.fullmatch(line) and not before.strip() and not after.strip():
            if article:
                yield article
            article = []
        if line.strip():
            article.append(line)
    if article:
        yield article
