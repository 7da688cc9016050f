"""Cleaning, language, length and split: the stages that need no other document."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.document import Document, Drop
from data_pipeline.split import split
from data_pipeline.text.clean import clean
from data_pipeline.text.language import keep_language
from data_pipeline.text.length import keep_long
from tests.data_pipeline.conftest import sentences


def test_clean_repairs_mojibake_and_normal_form() -> None:
    assert clean(Document("a", "âœ” No problem, schÃ¶n")) == Document("a", "✔ No problem, schön")
    assert clean(Document("a", "\ufb01ne e\u0301")) == Document("a", "fine é")
    assert clean(Document("a", "x²"), "NFKC") == Document("a", "x2")
    assert clean(Document("a", "as it was")) == Document("a", "as it was")


def test_clean_drops_what_is_empty() -> None:
    assert clean(Document("a", " \n\t ")) == Drop("empty")
    assert clean(Document("a", "")) == Drop("empty")


def test_language_keeps_one_and_names_the_others() -> None:
    english = Document("a", sentences(5, 1))
    german = Document("b", "Der Hund lief schnell über die Straße, weil das Wetter am Abend schlechter wurde.")
    assert keep_language(english) == english
    assert keep_language(german) == Drop("language de")
    assert keep_language(german, "de") == german
    assert keep_language(Document("c", "12345 67890 !!!")) == Drop("language not detectable")


def test_language_answers_the_same_every_time() -> None:
    doubtful = Document("a", "Sint in te pro et a no in me")
    assert len({keep_language(doubtful) for _ in range(20)}) == 1


def test_length_counts_to_the_limit() -> None:
    document = Document("a", "text")
    assert keep_long(document, 128) == document
    assert keep_long(document, 127) == Drop("fewer than 128 tokens")
    assert keep_long(document, 3, min_tokens=3) == document


@given(
    documents=st.integers(2, 2000),
    train=st.integers(1, 50),
    valid=st.integers(1, 50),
    seed=st.integers(0, 99),
)
def test_split_is_a_shuffled_partition_in_the_ratio(documents: int, train: int, valid: int, seed: int) -> None:
    left, right = split(documents, train, valid, seed)
    assert sorted([*left, *right]) == list(range(documents))
    assert len(left) >= 1
    assert len(right) >= 1
    assert abs(len(right) - documents * valid / (train + valid)) <= 1
    again = split(documents, train, valid, seed)
    assert np.array_equal(left, again[0])
    assert np.array_equal(right, again[1])


def test_split_depends_on_the_seed_alone() -> None:
    assert [part.tolist() for part in split(6, 2, 1, seed=1)] == [[2, 1, 4, 0], [3, 5]]
    assert not np.array_equal(split(600, seed=1)[0], split(600, seed=2)[0])
