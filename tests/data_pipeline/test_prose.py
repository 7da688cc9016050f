"""The measure of prose, on prose and on what stands beside it in documentation."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlm_repro.data_pipeline.document import Drop
from mlm_repro.data_pipeline.stages.prose import LONG, Prose, measure, paragraphs

SAMPLES = tomllib.loads(Path(__file__).with_name("prose.toml").read_text(encoding="utf-8"))
PROSE, NO_PROSE = SAMPLES["prose"], SAMPLES["other"]


@pytest.mark.parametrize("kind", PROSE)
def test_prose_is_kept_as_one_line_for_each_paragraph(kind: str) -> None:
    text = PROSE[kind].strip("\n")
    kept = Prose(min_words=20).apply(f"A Title\n=======\n{text}\n\nThe End\n")
    assert kept == " ".join(text.split())
    made_of = measure(text)
    assert made_of.function_words / made_of.words > 2 * Prose().min_function_words - 0.05


@pytest.mark.parametrize("kind", NO_PROSE)
def test_lists_tables_and_code_are_not_prose(kind: str) -> None:
    assert Prose().prose_of(NO_PROSE[kind]) == []
    assert Prose().apply(f"{NO_PROSE[kind]}\n\n{LONG}") == LONG


def test_each_bound_can_be_what_drops_a_paragraph() -> None:
    assert Prose().apply(LONG) == LONG
    for bound in ("min_words=61", "min_paragraph_words=61", "min_function_words=0.9", "min_letters=0.99"):
        name, _, value = bound.partition("=")
        assert Prose.model_validate({name: value}).apply(LONG) == Drop("too little prose"), bound
    assert Prose(max_sentence_words=19.5).apply(LONG) == Drop("too little prose")
    assert Prose(max_sentence_words=20).apply(LONG) == LONG


def test_a_composition_counts_what_it_says() -> None:
    made_of = measure('The cat said "no". It sat on 3 mats!')
    assert (made_of.characters, made_of.words, made_of.sentences) == (36, 9, 2)
    assert made_of.function_words == len(["The", "no", "It", "on"])
    assert made_of.letters == made_of.characters - len('"".3!')
    assert made_of.sentence_words == 4.5


PIECES = st.sampled_from([*PROSE.values(), *NO_PROSE.values(), LONG, "\n", "  ", "- ", ".\n", "Who goes there?"])
TEXTS = st.one_of(st.text(), st.lists(PIECES, max_size=8).map("\n\n".join), st.lists(PIECES, max_size=8).map("".join))


@given(TEXTS)
def test_prose_comes_out_as_it_went_in(text: str) -> None:
    kept = Prose(min_words=1).apply(text)
    if isinstance(kept, str):
        assert Prose(min_words=1).apply(kept) == kept
        assert kept.split() == [word for part in Prose().prose_of(text) for word in part.split()]


@given(TEXTS, TEXTS)
def test_paragraphs_are_judged_each_by_itself(one: str, other: str) -> None:
    assert Prose().prose_of(f"{one}\n\n{other}") == [*Prose().prose_of(one), *Prose().prose_of(other)]


@given(TEXTS)
def test_a_composition_is_within_its_text(text: str) -> None:
    made_of = measure(text)
    assert made_of.letters == sum(sign.isalpha() or sign.isspace() for sign in text)
    assert 0 <= made_of.function_words <= made_of.words == len(text.split())
    assert 0 <= made_of.letters <= made_of.characters == len(text)
    assert 0 <= made_of.sentences <= made_of.words
    assert all("\n" not in paragraph and paragraph.strip() == paragraph != "" for paragraph in paragraphs(text))


def test_a_long_hostile_text_takes_no_longer_than_its_length() -> None:
    for text in (
        "\n" * 200_000, " " * 200_000, "\n-" * 100_000, "." * 200_000, ".''''" * 40_000, "\n" + "-" * 200_000 + "x",
    ):  # fmt: skip
        assert Prose().apply(text) == Drop("too little prose")
