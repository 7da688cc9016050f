"""Texts of tests: reading, counting words, and cutting into articles before and after a
detokenizer."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mlm_repro.evaluation.protocol import SourceText
from mlm_repro.lineage.atomic import read_bytes
from mlm_repro.lineage.errors import BadInput, IntegrityFailure

_HEADING = re.compile(r"(?:(?<=\n \n)|(?<=\A \n)) = (?!= )([^\n]+?)(?<! =) = \n(?= \n)")
"""Matches a first-level heading of WikiText between empty lines; the first group is its title."""
_UNSTABLE = "@"
"""Characters besides white space that detokenizers remove: WikiText's mark `@`."""


@dataclass(frozen=True)
class RunningText:
    """Text on which perplexity is measured, published or a user's: its `source`, a SourceText; the
    whole `text`; its `articles`, pairs of a title and the character offset in `text`, empty if it
    has none; and `num_lm_eval_words`, its number of words as lm-evaluation-harness counts them."""

    source: SourceText
    text: str
    articles: Sequence[tuple[str, int]]
    """Pairs of the title and character offset in `text` of each article; the first has offset 0.
    Empty for a text without articles."""
    num_lm_eval_words: int
    """Number of words as lm-evaluation-harness counts them, document by document."""

    @classmethod
    def of_wikitext(cls, source: SourceText, text: str) -> Self:
        """Return the RunningText of a WikiText file's content `text`, with its articles, which
        begin at first-level headings, the first one at the text's beginning. Without such a heading
        it has no articles."""
        starts = [(match[1], match.start()) for match in _HEADING.finditer(text)]
        articles = [(title, start if number else 0) for number, (title, start) in enumerate(starts)]
        return cls(source, text, articles, sum(map(lm_eval_words, lm_eval_documents(text))))

    @classmethod
    def of_documents(cls, source: SourceText, documents: Sequence[str]) -> Self:
        """Return the RunningText of `documents`, a sequence of texts, joined by blank lines, with
        `source` as its source. Each document is an article, named `document 0` and so on, but a
        single document has no articles."""
        starts = [*accumulate((len(text) + 2 for text in documents), initial=0)][:-1]
        articles = (
            [(f"document {number}", start) for number, start in enumerate(starts)]
            if len(starts) > 1
            else []
        )
        return cls(source, "\n\n".join(documents), articles, sum(map(lm_eval_words, documents)))

    @property
    def num_original_tokens(self) -> int:
        """Number of the text's space-separated words T_o: the spaces in the stripped text plus
        one."""
        return count_original_tokens(self.text)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the text in UTF-8."""
        return len(self.text.encode("utf-8"))


def read_official(path: Path, sha256: str, name: str) -> str:
    """Return the text of the published file at `path`; `name` names it in errors. Raises
    IntegrityFailure if its content has another SHA-256 than `sha256`, BadInput if it cannot be
    read."""
    try:
        content = read_bytes(path)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise IntegrityFailure(
            f"{path} is not {name}, which `mlm-data fetch FOLDER` gets: its SHA-256 begins"
            f" {digest[:12]}, not {sha256[:12]}"
        )
    return content.decode("utf-8")


def count_original_tokens(text: str) -> int:
    """Return the number of spaces in the stripped text plus one: its space-separated tokens T_o as
    published, where a newline between spaces is a token. Words with only a newline between them
    count as one."""
    return text.strip().count(" ") + 1


def lm_eval_documents(text: str) -> Iterator[str]:
    """Yield the documents in the text of a WikiText file, the file as it stands and not the rows of
    `join_rows`, as lm-evaluation-harness cuts them: 62 in the test file, which has 60 articles.

    A line that begins and ends like a first-level heading starts a document and is its first line,
    wherever it occurs; two equations do (`wikitext_document_level.py` of the data set
    EleutherAI/wikitext_document_level). Text before the first such line is a document too, unless
    it is blank. A text without such a line is one document, even if it is blank or empty.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        heading = line.replace("= = =", "===").replace("= =", "==").strip()
        if heading.startswith("= ") and heading.endswith(" ="):
            if (document := "\n".join(lines)).strip():
                yield document
            lines = []
        lines.append(line)
    yield "\n".join(lines)


def join_rows(text: str) -> str:
    """Return one text of a WikiText file's rows with two newlines between them, as the hub's data
    set has the rows: each line of the content `text` with its own newline, or nothing for a line of
    one space."""
    return "\n\n".join("" if line == " \n" else line for line in text.splitlines(keepends=True))


def lm_eval_words(document: str) -> int:
    r"""Return the number of pieces of `document` between runs of white space, the empty ones at the
    ends included (`len(re.split(r"\s+", document))`)."""
    return len(re.split(r"\s+", document))


def cut_articles(text: RunningText, detokenized: str) -> list[str]:
    """Return a list of the articles of `text`, a RunningText, as they are in `detokenized`, the
    result of a detokenizer for its whole text; joined, they are `detokenized`. Raises ValueError if
    `text.articles`, which says where they begin in the original, is empty.

    Detokenizers change white space and marks only, so an article begins after as many other
    characters as in the original. The cut is before white space, where byte-level BPE never joins.
    """
    stable = np.cumsum(_is_stable(text.text))
    stable_indices = np.flatnonzero(_is_stable(detokenized))
    # An article starts right after the last stable character before it, whose number is counted in
    # the original.
    counts = [int(stable[start - 1]) if start else 0 for _, start in text.articles]
    starts = [int(stable_indices[count - 1]) + 1 if count else 0 for count in counts]
    return [
        detokenized[start:stop] for start, stop in zip(starts, [*starts[1:], None], strict=True)
    ]


def _is_stable(text: str) -> NDArray[np.bool_]:
    """Return for each character of `text`, as a boolean array [characters], whether a detokenizer
    keeps it: neither white space nor WikiText's mark `@`."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    unstable = [
        ord(character) for character in set(text) if character.isspace() or character in _UNSTABLE
    ]
    return ~np.isin(codes, unstable)
