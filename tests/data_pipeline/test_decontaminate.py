"""Cutting test-set text out of documents."""

import os
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.decontaminate import decontaminate, read_task_texts, split_and_keep, task_ngrams
from data_pipeline.document import Document, Drop
from data_pipeline.testsets import find_test_set
from tests.data_pipeline.conftest import WORDS, sentences

PASSAGE = (
    "Zebras quietly admire seventeen violet umbrellas whenever gentle thunder interrupts nine sleepy accordion players"
)


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def test_ngrams_of_a_passage_by_its_length() -> None:
    thirteen = [f"w{i}" for i in range(15)]
    assert set(task_ngrams([" ".join(thirteen)]).ngrams) == {" ".join(thirteen[i : i + 13]) for i in range(3)}
    assert set(task_ngrams(["One, two; THREE four five six seven eight!"]).ngrams) == {
        "one two three four five six seven eight"
    }
    assert set(task_ngrams(["one two three four five six seven"]).ngrams) == set()


def test_document_without_a_match_is_returned_as_it_is() -> None:
    document = Document("a", sentences(30, 1))
    assert decontaminate(document, task_ngrams([PASSAGE])) == [document]
    assert decontaminate(document, task_ngrams([])) == [document]


def test_cut_runs_from_sentence_end_to_sentence_end() -> None:
    before, after = sentences(20, 1), sentences(20, 2)
    text = f"{before} {PASSAGE}. {after}"
    parts = split_and_keep(text, task_ngrams([PASSAGE]))
    start = text.index("Zebras")
    end = start + len(PASSAGE) + 200
    assert parts == [text[: text.rindex(".", 0, start - 199) + 1], text[text.index(".", end) + 1 :]]


def test_case_and_punctuation_do_not_hide_a_match() -> None:
    disguised = ", ".join(PASSAGE.upper().split())
    assert len(split_and_keep(f"{sentences(20, 1)} {disguised}. {sentences(20, 2)}", task_ngrams([PASSAGE]))) == 2


def test_short_parts_are_not_kept() -> None:
    ngrams = task_ngrams([PASSAGE])
    assert decontaminate(Document("a", f"A few words. {PASSAGE}. A few more."), ngrams) == Drop("test-set text")
    long = sentences(20, 2)
    parts = decontaminate(Document("a", f"A few words. {PASSAGE}. {long}"), ngrams)
    assert isinstance(parts, list)
    assert [part.id for part in parts] == ["a#0"]
    assert long.endswith(parts[0].text)


def test_part_must_be_longer_than_the_limit() -> None:
    rest = "x" * 50
    text = f"{PASSAGE} {'y' * 9}.{rest}"
    assert split_and_keep(text, task_ngrams([PASSAGE]), margin=5, min_part=49) == [rest]
    assert split_and_keep(text, task_ngrams([PASSAGE]), margin=5, min_part=50) == []
    text = f"{rest}. yy {PASSAGE}"
    assert split_and_keep(text, task_ngrams([PASSAGE]), margin=3, min_part=50) == [rest + "."]
    assert split_and_keep(text, task_ngrams([PASSAGE]), margin=3, min_part=51) == []


def test_too_many_parts_drop_the_document() -> None:
    ngrams = task_ngrams([PASSAGE])
    pieces = [sentences(20, seed) for seed in range(12)]
    ten = decontaminate(Document("a", f" {PASSAGE}. ".join(pieces[:10])), ngrams)
    assert isinstance(ten, list)
    assert len(ten) == 10
    assert decontaminate(Document("a", f" {PASSAGE}. ".join(pieces[:11])), ngrams) == Drop(
        "test-set text in more than 10 parts"
    )


@settings(deadline=None, max_examples=60)
@given(
    pieces=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    margin=st.integers(0, 300),
    min_part=st.integers(0, 300),
)
def test_parts_are_clean_ordered_pieces_of_the_text(pieces: list[int], margin: int, min_part: int) -> None:
    text = f" {PASSAGE}. ".join(sentences(count, count) for count in pieces)
    parts = split_and_keep(text, task_ngrams([PASSAGE]), margin, min_part)
    position = 0
    for part in parts:
        position = text.index(part, position) + len(part)
        assert "zebras quietly admire" not in part.lower()
        assert parts == [text] or len(part) > min_part


@settings(deadline=None)
@given(st.lists(st.sampled_from(WORDS[:3]), max_size=60), st.lists(st.sampled_from(WORDS[:3]), max_size=20))
def test_matches_are_those_of_a_plain_search(document: list[str], passage: list[str]) -> None:
    ngrams = task_ngrams([" ".join(passage)], words=4, min_words=2)
    length = min(4, len(passage))
    expected = set()
    if length >= 2:
        wanted = {tuple(passage[i : i + length]) for i in range(len(passage) - length + 1)}
        expected = {i for i in range(len(document) - length + 1) if tuple(document[i : i + length]) in wanted}
    starts = [match.start() for match in re.finditer(r"\w+", " ".join(document))]
    assert [position for position, _ in ngrams.matches(" ".join(document))] == [starts[i] for i in sorted(expected)]


@pytest.mark.skipif(not os.environ.get("MLM_DATA_DIR"), reason="MLM_DATA_DIR is not set")
@pytest.mark.parametrize("name", ["wikitext103", "lambada"])
def test_planted_passages_of_the_real_test_sets_are_removed(name: str) -> None:
    passages = [text for text in read_task_texts(find_test_set(name)) if len(words_of(text)) > 60]
    ngrams = task_ngrams(passages)
    for number in range(0, len(passages), len(passages) // 20):
        middle = " ".join(words_of(passages[number])[5:40])
        text = f"{sentences(20, 1)} {middle}. {sentences(20, 2)}"
        parts = split_and_keep(text, ngrams)
        assert parts != [text]
        left = words_of(" ".join(parts))
        assert not any(" ".join(left[i : i + 13]) in ngrams.ngrams for i in range(len(left)))
        assert sum(map(len, parts)) > 600
    assert split_and_keep(sentences(200, 3), ngrams) == [sentences(200, 3)]
