"""The text of a test-set file as passages, and the n-grams of its words.

WikiText's own marks do not hide a match with the text it was made from: `3 @-@ 4`, `10 @,@ 000` and `Teddy 's` have the
words of `3-4`, `10,000` and `Teddy's`. Only `<unk>` does, which stands for one word outside WikiText's vocabulary: no
other text has it there, so a passage ends where it stands and another begins.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from data_pipeline.contamination.words import Ngrams, words_of
from data_pipeline.reading.lines import parse_line
from lineage.errors import BadInput

UNKNOWN_WORD = "<unk>"
WIKITEXT_SUFFIX = ".tokens"
WIKITEXT_TITLE = re.compile(r" = [^=].*[^=] = ")


def read_documents(path: Path) -> list[list[str]]:
    """The documents of a test-set file, each as its passages.

    In a `.jsonl` file the `text` of a line is a document, in WikiText's `.tokens` an article, whose lines are its
    passages, in any other file each line; every passage is divided at `<unk>`. Raises BadInput for a file that cannot
    be read so.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"the test set {path} cannot be read: {error}") from error
    if path.suffix == ".jsonl":
        grouped = [[_text(path, number, line)] for number, line in enumerate(lines, 1) if line.strip()]
    elif path.suffix == WIKITEXT_SUFFIX:
        grouped = list(_articles(lines))
    else:
        grouped = [[line] for line in lines if line.strip()]
    return [[part for line in group for part in line.split(UNKNOWN_WORD)] for group in grouped]


@lru_cache(maxsize=2)
def ngrams_of_files(paths: tuple[Path, ...], words: int, min_words: int) -> Ngrams:
    """The n-grams of every passage of the test-set files that has at least `min_words` words."""
    passages = (words_of(passage) for path in paths for document in read_documents(path) for passage in document)
    return Ngrams(tuple(" ".join(passage) for passage in passages if len(passage) >= max(1, min_words)), words)


def _text(path: Path, number: int, line: str) -> str:
    try:
        record = parse_line(line.encode("utf-8"))
    except ValueError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise BadInput(f"the test set {path}, line {number}, is not a JSON object with a string `text`")
    return str(record["text"])


def _articles(lines: list[str]) -> Iterator[list[str]]:
    """Lines that are not empty, from one title, between empty lines, to the next; formulas look like titles too."""
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
