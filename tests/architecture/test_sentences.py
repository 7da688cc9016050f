"""Idioms that readers stumble over are rare, and reasons stand beside the code."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.architecture.rooms import modules
from tests.architecture.test_imports import core_modules

IDIOMS = {
    "a pronoun for a noun": r"\b(those|that) of\b",
    "an amount without a number": r"\bso (many|much)\b(?! (?:that|as))",
    "absence without a condition": r"\b(is|are) none\b|\b(from|in|to|is|are) nowhere\b"
    r"|\bfor no [a-z]+\b",
    "repetition without a verb of the field": r"\b(made|built|read) again\b",
    "a nested genitive": r"\bof (which|whom)\b|\bwhose [a-z]+ is of\b",
    "a thing that is not named": r"\bwhat (is|are|was|has|it|they)\b",
    "a place for an index": r"(?<!in )(?<!take )(?<!takes )\bplaces?\b(?! of (?:work|birth))",
    "to hold against": r"\b(hold|holds|held|holding) (it |them |[a-z]+ )?against\b",
    "asked of": r"\basked of\b",
    "most for a peak": r"^Most\b|\bmost (bytes|forward|activations|numbers)\b",
}
"""Patterns that readers from outside named, by what is unclear in them."""
ROOMS = (
    "engine",
    "data_pipeline",
    "evaluation",
    "experiments",
    "verify",
    "lineage",
    "reports",
    "benchmarks",
    "docs",
)


def sentences(source: str) -> Iterator[str]:
    """Each docstring and each comment of a Python source."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")


def count(texts: list[str]) -> tuple[int, dict[str, int]]:
    """Words of the texts, and how often each idiom stands in them."""
    flat = [" ".join(text.split()) for text in texts]
    found = {
        name: sum(len(re.findall(idiom, text)) for text in flat) for name, idiom in IDIOMS.items()
    }
    return sum(len(text.split()) for text in flat), found


@pytest.mark.parametrize("room", ROOMS)
def test_idioms_are_rare(room: str) -> None:
    words, found = count([text for path in modules(room) for text in sentences(path.read_text())])
    assert words > 500
    assert sum(found.values()) * 10_000 / words <= 25, (words, found)


def test_an_idiom_is_counted() -> None:
    planted = '"""The place of a token, as those of others."""\nrank = 1  # what is left\n'
    words, found = count(list(sentences(planted)))
    assert words == 12
    assert {name for name, number in found.items() if number} == {
        "a place for an index", "a pronoun for a noun", "a thing that is not named"
    }  # fmt: skip


def comments_and_lines(source: str) -> tuple[int, int]:
    """Comments that are no directive, and lines that hold a token beside comments."""
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    idle = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    held = (token for token in tokens if token.type not in idle)
    lines = {line for token in held for line in range(token.start[0], token.end[0] + 1)}
    return sum(
        not text.startswith(("# fmt:", "# type:", "# noqa", "#!")) for text in comments
    ), len(lines)


def test_the_core_gives_its_reasons() -> None:
    counted = [comments_and_lines(path.read_text(encoding="utf-8")) for path in core_modules()]
    comments, lines = (sum(column) for column in zip(*counted, strict=True))
    assert comments / lines >= 0.06, (comments, lines)
