"""The measure of prose, on prose and on what stands beside it in documentation."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlm_repro.data_pipeline.document import Drop
from mlm_repro.data_pipeline.stages.prose import (
    LONG,
    SENTENCE_END,
    SHORT,
    Prose,
    function_words,
    letters,
    paragraphs,
)

SAMPLES = tomllib.loads(Path(__file__).with_name("prose.toml").read_text(encoding="utf-8"))
PROSE, NO_PROSE = SAMPLES["prose"], SAMPLES["other"]


@pytest.mark.parametrize("kind", PROSE)
def test_prose_is_kept_as_one_line_for_each_paragraph(kind: str) -> None:
    text = PROSE[kind].strip("\n")
    kept = Prose(min_words=20).apply(f"A Title\n=======\n{text}\n\nThe End\n")
    assert kept == " ".join(text.split())
    words = text.split()
    assert function_words(words) / len(words) > 2 * Prose().min_function_words - 0.05


@pytest.mark.parametrize("kind", NO_PROSE)
def test_lists_tables_and_code_are_not_prose(kind: str) -> None:
    assert Prose().prose_of(NO_PROSE[kind]) == []
    assert Prose().apply(f"{NO_PROSE[kind]}\n\n{LONG}") == LONG


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (f"{SHORT}\n{SHORT}\n{SHORT}\n\n>>> print(17)\n17", LONG),
        ("Bug fixes\n\n- #1 fixed\n- #2 fixed", Drop("too little prose")),
        (SHORT, Drop("too little prose")),
    ],
)
def test_what_is_left_of_short_pages(text: str, outcome: str | Drop) -> None:
    assert Prose().apply(text) == outcome


def test_each_bound_can_be_what_drops_a_paragraph() -> None:
    assert Prose().apply(LONG) == LONG
    for bound in (
        "min_words=61",
        "min_paragraph_words=61",
        "min_function_words=0.9",
        "min_letters=0.99",
    ):
        name, _, value = bound.partition("=")
        assert Prose.model_validate({name: value}).apply(LONG) == Drop("too little prose"), bound
    assert Prose(max_sentence_words=19.5).apply(LONG) == Drop("too little prose")
    assert Prose(max_sentence_words=20).apply(LONG) == LONG


def test_function_words_letters_and_sentences_are_counted() -> None:
    text = 'The cat said "no". It sat on 3 mats!'
    assert function_words(text.split()) == len(["The", "no", "It", "on"])
    assert letters(text) == len(text) - len('"".3!')
    assert len(SENTENCE_END.findall(text)) == 2


PIECES = st.sampled_from(
    [*PROSE.values(), *NO_PROSE.values(), LONG, "\n", "  ", "- ", ".\n", "Who goes there?"]
)
TEXTS = st.one_of(
    st.text(),
    st.lists(PIECES, max_size=8).map("\n\n".join),
    st.lists(PIECES, max_size=8).map("".join),
)


@given(TEXTS)
def test_prose_comes_out_as_it_went_in(text: str) -> None:
    kept = Prose(min_words=1).apply(text)
    if isinstance(kept, str):
        assert Prose(min_words=1).apply(kept) == kept
        assert kept.split() == [word for part in Prose().prose_of(text) for word in part.split()]


@given(TEXTS, TEXTS)
def test_paragraphs_are_judged_each_by_itself(one: str, other: str) -> None:
    assert Prose().prose_of(f"{one}\n\n{other}") == [
        *Prose().prose_of(one),
        *Prose().prose_of(other),
    ]


@given(TEXTS)
def test_counts_are_within_their_text(text: str) -> None:
    words = text.split()
    assert letters(text) == sum(sign.isalpha() or sign.isspace() for sign in text)
    assert 0 <= function_words(words) <= len(words)
    assert len(SENTENCE_END.findall(text)) <= len(words)
    assert all(
        "\n" not in paragraph and paragraph.strip() == paragraph != ""
        for paragraph in paragraphs(text)
    )


def test_a_long_hostile_text_takes_no_longer_than_its_length() -> None:
    for text in (
        "\n" * 200_000,
        " " * 200_000,
        "\n-" * 100_000,
        "." * 200_000,
        ".''''" * 40_000,
        "\n" + "-" * 200_000 + "x",
    ):
        assert Prose().apply(text) == Drop("too little prose")
