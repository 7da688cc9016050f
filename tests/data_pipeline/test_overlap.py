"""The overlap of a corpus with a test set is the one that counting everything gives."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlm_repro.data_pipeline.passes.overlap import count_overlap, overlap
from tests.data_pipeline.conftest import write_jsonl

WORD_LISTS = st.lists(st.sampled_from(["a", "B", "c,", "d.", "İ"]), max_size=25).map(" ".join)


def merged(parts: Iterable[tuple[int, set[str]]]) -> set[str]:
    """What was found in all parts together."""
    return set[str]().union(*(found for _, found in parts))


def brute_force(texts: list[str], documents: list[str], words: int) -> list[list[int]]:
    """For each document the n-grams it has and those that stand, word for word, in a text."""
    padded = [
        "".join(f" {word.lower()}" for word in re.findall(r"\w+", text)) + " " for text in texts
    ]
    shares = []
    for document in documents:
        found = [word.lower() for word in re.findall(r"\w+", document)]
        ngrams = [" ".join(found[i : i + words]) for i in range(len(found) - words + 1)]
        shares.append(
            [len(ngrams), sum(any(f" {ngram} " in text for text in padded) for ngram in ngrams)]
        )
    return shares


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shards=st.lists(st.lists(WORD_LISTS, max_size=3), min_size=1, max_size=4),
    documents=st.lists(WORD_LISTS, min_size=1, max_size=4),
    words=st.integers(1, 5),
)
def test_overlap_is_a_brute_force_count(
    shards: list[list[str]],
    documents: list[str],
    words: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    test_set = write_jsonl(tmp_path_factory.mktemp("overlap") / "exam.jsonl", documents)
    parts = [count_overlap(iter(texts), test_set, words) for texts in shards]
    found = overlap(merged(parts), test_set, words)
    texts = [text for shard in shards for text in shard]
    shares = brute_force(texts, documents, words)
    assert found["documents"] == shares
    assert sum(read for read, _ in parts) == len(texts)
    assert [*found["occurrences"].values()] == [
        sum(share[place] for share in shares) for place in (0, 1)
    ]
    assert (
        found["distinct"]["found"] <= found["distinct"]["ngrams"] <= found["occurrences"]["ngrams"]
    )


def test_an_example(tmp_path: Path) -> None:
    test_set = write_jsonl(tmp_path / "exam.jsonl", ["a b c d", "x y", "a b c"])
    read, contained = count_overlap(["A, b -- c!", "y x", "b c"], test_set, words=3)
    assert (read, contained) == (3, {"a b c"})
    assert overlap(contained, test_set, words=3) == {
        "percent": pytest.approx(200 / 3),
        "occurrences": {"ngrams": 3, "found": 2},
        "distinct": {"ngrams": 2, "found": 1},
        "documents": [[2, 1], [0, 0], [1, 1]],
    }
