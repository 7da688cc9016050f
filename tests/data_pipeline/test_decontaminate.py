"""Test-set files as passages, and cutting their text out of documents."""

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_repro.data_pipeline.contamination.decontaminate import (
    SENTENCE_END,
    decontaminate,
    ngrams_of_files,
    read_documents,
    split_and_keep,
)
from mlm_repro.data_pipeline.contamination.testsets import TEST_SETS, find_test_set
from mlm_repro.data_pipeline.contamination.words import Ngrams, words_of
from mlm_repro.data_pipeline.document import Document, Drop
from mlm_repro.evaluation.tasks.detokenize import detokenize_wikitext
from mlm_repro.lineage.errors import BadInput
from tests.data_pipeline.conftest import ngrams_in, sentences

PASSAGE = (
    "Zebras quietly admire seventeen violet umbrellas whenever gentle thunder interrupts nine"
    " sleepy accordion players"
)


def split_and_search_again(text: str, ngrams: Ngrams, margin: int, min_part: int) -> list[str]:
    """The rule as it is told: cut at the first match, then look at the rest as a text of its
    own."""
    parts: list[str] = []
    rest = text
    while match := next(ngrams.matches(rest), None):
        start, ngram = match
        left = start - margin
        while left > 0 and rest[left] not in SENTENCE_END:
            left -= 1
        right = start + len(ngram) + margin
        while right < len(rest) and rest[right] not in SENTENCE_END:
            right += 1
        if left > 0 and left + 1 > min_part:
            parts.append(rest[: left + 1])
        rest = rest[right + 1 :]
        if len(rest) <= min_part:
            return parts
    return [*parts, rest]


def test_ngrams_of_a_passage_by_its_length() -> None:
    thirteen = [f"w{i}" for i in range(15)]
    assert set(ngrams_in([" ".join(thirteen)]).ngrams) == {
        " ".join(thirteen[i : i + 13]) for i in range(3)
    }
    assert set(ngrams_in(["One, two; THREE four five six seven eight!"]).ngrams) == {
        "one two three four five six seven eight"
    }
    assert set(ngrams_in(["one two three four five six seven"]).ngrams) == set()


def test_document_without_a_match_is_returned_as_it_is() -> None:
    document = Document("a", sentences(30, 1))
    assert decontaminate(document, ngrams_in([PASSAGE])) == [document]
    assert decontaminate(document, ngrams_in([])) == [document]


def test_short_parts_are_not_kept() -> None:
    ngrams = ngrams_in([PASSAGE])
    assert decontaminate(Document("a", f"A few words. {PASSAGE}. A few more."), ngrams) == Drop(
        "test-set text"
    )
    long = sentences(20, 2)
    parts = decontaminate(Document("a", f"A few words. {PASSAGE}. {long}"), ngrams)
    assert isinstance(parts, list)
    assert [part.id for part in parts] == ["a#0"]
    assert long.endswith(parts[0].text)


def test_too_many_parts_drop_the_document() -> None:
    ngrams = ngrams_in([PASSAGE])
    pieces = [sentences(20, seed) for seed in range(12)]
    ten = decontaminate(Document("a", f" {PASSAGE}. ".join(pieces[:10])), ngrams)
    assert isinstance(ten, list)
    assert len(ten) == 10
    assert decontaminate(Document("a", f" {PASSAGE}. ".join(pieces[:11])), ngrams) == Drop(
        "test-set text in more than 10 parts"
    )


@settings(max_examples=300)
@given(
    text=st.lists(
        st.sampled_from(["a", "b", "İ", "Σ", "c.", "d!", "e?", ".", ", ", "xx yy"]), max_size=80
    ),
    passage=st.lists(st.sampled_from(["a", "b", "İ", "ς", "xx"]), min_size=1, max_size=6),
    glue=st.sampled_from([" ", "", " - "]),
    words=st.integers(1, 4),
    margin=st.integers(0, 12),
    min_part=st.integers(0, 12),
)
def test_one_search_cuts_as_searching_every_rest_again(
    text: list[str], passage: list[str], glue: str, words: int, margin: int, min_part: int
) -> None:
    ngrams = ngrams_in([" ".join(passage)], words, shortest=1)
    expected = split_and_search_again(glue.join(text), ngrams, margin, min_part)
    assert split_and_keep(glue.join(text), ngrams, margin, min_part) == expected


def test_matches_are_counted_over_all_files(tmp_path: Path) -> None:
    (tmp_path / "exam.jsonl").write_text(json.dumps({"text": PASSAGE}) + "\n", encoding="utf-8")
    (tmp_path / "lines.txt").write_text(
        "one two three four five six seven eight nine\ntoo short\n", encoding="utf-8"
    )
    paths = (tmp_path / "exam.jsonl", tmp_path / "lines.txt")
    text = (
        f"{PASSAGE.upper()}! One, two, three four five six seven (eight) nine. {PASSAGE}; too short"
    )
    found = Counter(ngram for _, ngram in ngrams_of_files(paths, 8, 8).matches(text))
    first = " ".join(words_of(PASSAGE)[:8])
    assert found[first] == 2
    assert found["one two three four five six seven eight"] == 1
    assert found == {ngram: found[ngram] for ngram in ngrams_of_files(paths, 8, 8).ngrams}


def article_as_written(article: list[str], rng: random.Random) -> str:
    """A WikiText article as a web page has it: Megatron's detokenizer, a name for each `<unk>`,
    curly quotes."""
    text = detokenize_wikitext("\n".join(f" {' <unk> '.join(article)} \n".split("\n")))
    text = re.sub("<unk>", lambda _: rng.choice(["Smith", "Ōkubo", "O'Brien", "Łódź"]), text)
    return text.replace(" '", "‘").replace("'", "’").replace('"', "“")


@pytest.mark.parametrize("name", ["wikitext103", "lambada"])
def test_planted_passages_of_whole_test_sets_are_removed(name: str, made_data: Path) -> None:
    """Every planted document is found and cleaned, none other is touched."""
    path = made_data / TEST_SETS[name].place
    rng = random.Random(1)
    ngrams = ngrams_of_files((path,), 13, 8)
    planted = 0
    for document in read_documents(path):
        written = article_as_written(document, rng) if name == "wikitext103" else document[0]
        paragraphs = [line for line in written.split("\n") if len(words_of(line)) > 40]
        if not paragraphs:
            continue
        words = re.findall(r"\S+", rng.choice(paragraphs))
        begin = rng.randrange(max(1, len(words) - 40))
        text = (
            f"{sentences(20, planted)} {' '.join(words[begin : begin + 40])}."
            f" {sentences(20, planted + 1)}"
        )
        planted += 1
        parts = split_and_keep(text, ngrams)
        assert parts != [text], text
        assert not any(next(ngrams.matches(part), None) for part in parts)
        assert sum(map(len, parts)) > 600
    assert planted >= 50
    assert split_and_keep(sentences(2_000, 3), ngrams) == [sentences(2_000, 3)]


def test_lines_of_text_and_of_json_are_documents(tmp_path: Path) -> None:
    text, jsonl = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("One line\u2028here\n\n = Title = \nanother\n", encoding="utf-8")
    jsonl.write_text('{"text": "One\\nline", "id": 3}\n\n{"text": "\u2028"}\n', encoding="utf-8")
    assert read_documents(text) == [["One line\u2028here"], [" = Title = "], ["another"]]
    assert read_documents(jsonl) == [["One\nline"], ["\u2028"]]


def test_wikitext_is_read_by_article_and_divided_at_unknown_words(tmp_path: Path) -> None:
    path = tmp_path / "wiki.tokens"
    article = (
        " \n = A b = \n \n one <unk> two \n \n = = History = = \n \n three \n = 1 and so y = \n"
        " z \n"
    )
    path.write_text(f"{article} \n = C = D = \n \n four \n", encoding="utf-8")
    assert read_documents(path) == [
        [" = A b = ", " one ", " two ", " = = History = = ", " three ", " = 1 and so y = ", " z "],
        [" = C = D = ", " four "],
    ]


def test_passages_do_not_touch(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("a b c <unk> d e f\ng h\n", encoding="utf-8")
    assert ngrams_of_files((path,), 2, 2).ngrams == {"a b", "b c", "d e", "e f", "g h"}
    assert ngrams_of_files((path,), 3, 2).ngrams == {"a b c", "d e f", "g h"}


@pytest.mark.parametrize(
    "line", ["{", "[1]", '{"text": 3}', '{"body": "x"}', "null", "[" * 100_000]
)
def test_lines_that_are_no_documents_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "exam.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(
        BadInput, match=r"exam\.jsonl, line 2, is not a JSON object with a string `text`"
    ):
        read_documents(path)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "bytes.txt").write_bytes(b"a\xffb")
    for name in ("bytes.txt", "absent.txt"):
        with pytest.raises(BadInput, match=f"{name} cannot be read"):
            read_documents(tmp_path / name)


@pytest.mark.usefixtures("published")
def test_published_test_sets_have_their_documents() -> None:
    articles = read_documents(find_test_set("wikitext103"))
    assert articles[0][0] == " = Robert Boulter = "
    assert len(articles) == 60
    assert len(read_documents(find_test_set("wikitext103-valid"))) == 60
    assert len(read_documents(find_test_set("lambada"))) == 5153
