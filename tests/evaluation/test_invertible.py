"""The invertible detokenizer: undone for every text, and English on WikiText's own lines."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evaluation.invertible import ESCAPE, detokenize, retokenize

words = st.one_of(
    st.sampled_from(
        [
            "a",
            "s",
            "Mr",
            "Mr.",
            "U.S.",
            "boys",
            "5",
            "1,000",
            "3-4",
            "@-@",
            "@,@",
            "@.@",
            "'s",
            "'t",
            "'",
            '"',
            "<unk>",
            *"()[]{}.,;:!?%°$£€=-\\",
            "==",
            "--",
            "...",
            ". . .",
            "don't",
            "(a)",
            "\\ a",
        ]
    ),
    st.text(st.characters(codec="utf-8"), max_size=4),
)
lines = st.lists(words, max_size=12).map(lambda line: f" {' '.join(line)} \n")
texts = st.one_of(st.lists(lines, max_size=4).map("".join), st.text(max_size=40), st.text(" \n\\ab.,-\"'", max_size=30))


@given(texts)
@example("")
@example(" ")
@example(" \n")
@example("\\")
@example("no edges\n  two  spaces \n\n a\tb \n \\ a \n end")
def test_every_text_comes_back(text: str) -> None:
    assert retokenize(detokenize(text)) == text


@pytest.mark.parametrize("name", ["wiki.test.tokens", "wiki.valid.tokens"])
def test_the_published_files_come_back(published: Path, name: str) -> None:
    text = (published / "wikitext-103" / name).read_bytes().decode()
    detokenized = detokenize(text)
    assert retokenize(detokenized) == text
    escapes = sum(word.startswith(ESCAPE) for line in detokenized.split("\n") for word in line.split(" "))
    assert escapes < 60
    assert len(detokenized) < 0.97 * len(text)


@pytest.mark.parametrize(
    ("written", "english"),
    [
        (" \n = = Early life = = \n", "\n== Early life ==\n"),
        (' He said " yes , ( once ) . " \n', 'He said "yes, (once)."\n'),
        (" the boys ' club didn 't see Bob 's \n", "the boys' club didn't see Bob's\n"),
        (" a well @-@ known 1 @,@ 000 or 3 @.@ 5 % \n", "a well-known 1,000 or 3.5%\n"),
        (" Mr. Smith of the U.S. Army \n", "Mr. Smith of the U.S. Army\n"),
        (" of <unk> , <unk> . \n", "of <unk>, <unk>.\n"),
    ],
)
def test_it_reads_as_english(written: str, english: str) -> None:
    assert detokenize(written) == english


def test_what_would_be_misread_is_escaped() -> None:
    assert detokenize(" Mr . Smith \n") == "Mr . Smith\n"
    assert detokenize(" end. \n") == "\\end.\n"
    assert detokenize("bare") == "\\bare"
