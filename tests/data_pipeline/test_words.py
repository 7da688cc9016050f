"""The n-gram search gives what a search by sets of strings gives, on any text."""

import re
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.data import reference_search
from mlm_repro.data_pipeline.contamination.words import Ngrams
from mlm_repro.data_pipeline.fast.ngram_index import CHUNK_CHARACTERS, NgramIndex, fold_table
from tests.data_pipeline.conftest import ngrams_in, sentences

LETTERS = "aAbßẞſKkKåÅσςΣİiIıǅǆéÉ٣Ⅷ²_०日語ﬁΩ𐐀𐐨𝔄"
OTHERS = " .-'\n\u0301\u0307\u200d\ud800\udfff©\u00adⒶ"


def naive(text: str, passages: list[str], length: int, shortest: int) -> list[tuple[int, str]]:
    """Matches by comparing every run of words with every run of every passage."""
    wanted = set()
    for passage in passages:
        found = [word.lower() for word in re.findall(r"\w+", passage)]
        if len(found) >= shortest:
            size = min(length, len(found))
            wanted |= {tuple(found[i : i + size]) for i in range(len(found) - size + 1)}
    spans = list(re.finditer(r"\w+", text))
    result = []
    for start in range(len(spans)):
        for size in sorted({len(ngram) for ngram in wanted}, reverse=True):
            run = tuple(span.group().lower() for span in spans[start : start + size])
            if len(run) == size and run in wanted:
                result.append((spans[start].start(), " ".join(run)))
    return result


def variants(pieces: list[str]) -> Iterator[str]:
    text = "".join(pieces)
    yield from (text, text.swapcase(), text.upper(), text[::-1], text.replace(" ", ", "))


@settings(max_examples=300)
@given(
    passages=st.lists(
        st.text(st.sampled_from(LETTERS + OTHERS + "   "), max_size=30), min_size=1, max_size=4
    ),
    between=st.text(st.characters(codec=None), max_size=20),
    length=st.integers(1, 5),
    shortest=st.integers(1, 5),
)
def test_both_searches_are_the_naive_one(
    passages: list[str], between: str, length: int, shortest: int
) -> None:
    ngrams = ngrams_in(passages, length, shortest)
    if not ngrams.ngrams:
        assert list(ngrams.matches("a b c")) == []
        return
    for text in variants([*passages, between, passages[0]]):
        expected = naive(text, passages, length, shortest)
        assert reference_search(ngrams)(text) == expected
        assert list(ngrams.search(text)) == expected
        assert list(ngrams.matches(text)) == expected
        assert list(Ngrams.of(ngrams.ngrams).matches(text)) == expected


@settings(max_examples=200)
@given(text=st.text(st.characters(codec=None)), other=st.text(st.characters(codec=None)))
def test_any_characters(text: str, other: str) -> None:
    ngrams = ngrams_in([text, text + other], 2, 1)
    if ngrams.ngrams:
        for searched in (text, other + text, text.lower(), text.upper()):
            assert list(ngrams.search(searched)) == reference_search(ngrams)(searched)


def test_every_character_is_in_words_as_python_says() -> None:
    fold = fold_table()
    assert [bool(fold[code]) for code in range(sys.maxunicode + 1)] == [
        re.match(r"\w", chr(code)) is not None for code in range(sys.maxunicode + 1)
    ]


def test_every_character_is_found_in_both_cases() -> None:
    letters = [chr(code) for code in range(sys.maxunicode + 1) if re.match(r"\w", chr(code))]
    assert len(letters) > 100_000
    ngrams = Ngrams.of(f"x{letter.lower()}y z" for letter in letters)
    for text in (
        " . ".join(f"x{form(letter)}y z" for letter in letters)
        for form in (str, str.lower, str.swapcase)
    ):
        found = list(ngrams.search(text))
        assert len(found) > 100_000
        assert found == reference_search(ngrams)(text)


@pytest.mark.parametrize("words_before", range(4))
@pytest.mark.parametrize("shift", [-30, -14, -9, -5, -1, 0, 1])
def test_matches_across_the_border_of_two_chunks(shift: int, words_before: int) -> None:
    passage = "alpha betaß gamma delta"
    ngrams = ngrams_in([passage], 4, 4)
    before = "ab " * words_before
    filler = "." * (CHUNK_CHARACTERS + shift - len(before))
    text = f"{filler}{before}{passage} {'é' * (2 * CHUNK_CHARACTERS)} {passage}"
    places = [position for position, _ in ngrams.search(text)]
    assert places == [len(filler) + len(before), len(text) - len(passage)]


def test_hash_hits_are_compared_word_by_word(monkeypatch: pytest.MonkeyPatch) -> None:
    ngrams = ngrams_in(["one two three", "two three four"], 3, 3)
    text = "Zero one two, three four; one two four."
    everywhere = lambda _, text: (word.start() for word in re.finditer(r"\w+", text))  # noqa: E731
    monkeypatch.setattr(NgramIndex, "candidates", everywhere)
    assert list(ngrams.search(text)) == [(5, "one two three"), (9, "two three four")]


def test_memory_beyond_a_long_text_is_constant() -> None:
    ngrams = ngrams_in([sentences(3, 1)], 8, 8)
    text = sentences(2_000, 2) * 100 + sentences(3, 1)
    assert len(text) > 10_000_000
    list(ngrams.search(text[:100_000]))
    tracemalloc.start()
    assert sum(Counter(ngram for _, ngram in ngrams.search(text)).values()) == len(ngrams.ngrams)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000
