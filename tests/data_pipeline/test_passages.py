"""Test-set files as passages."""

from pathlib import Path

import pytest

from data_pipeline.contamination.decontaminate import ngrams_of_files, read_documents
from data_pipeline.contamination.testsets import find_test_set
from lineage.errors import BadInput


def test_lines_of_text_and_of_json_are_documents(tmp_path: Path) -> None:
    text, jsonl = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("One line\u2028here\n\n = Title = \nanother\n", encoding="utf-8")
    jsonl.write_text('{"text": "One\\nline", "id": 3}\n\n{"text": "\u2028"}\n', encoding="utf-8")
    assert read_documents(text) == [["One line\u2028here"], [" = Title = "], ["another"]]
    assert read_documents(jsonl) == [["One\nline"], ["\u2028"]]


def test_wikitext_is_read_by_article_and_divided_at_unknown_words(tmp_path: Path) -> None:
    path = tmp_path / "wiki.tokens"
    article = " \n = A b = \n \n one <unk> two \n \n = = History = = \n \n three \n = 1 and so y = \n z \n"
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


@pytest.mark.parametrize("line", ["{", "[1]", '{"text": 3}', '{"body": "x"}', "null", "[" * 100_000])
def test_lines_that_are_no_documents_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "exam.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(BadInput, match=r"exam\.jsonl, line 2, is not a JSON object with a string `text`"):
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
