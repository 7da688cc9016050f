"""Compiled Jaccard similarity against sets of strings."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.duplicates.similarity import ShingledTexts, shingle_keys, similarity
from data_pipeline.fast.shingles import as_bytes, first_end, jaccard, pack, shingles
from tests.data_pipeline.conftest import sentences
from tests.data_pipeline.test_minhash import TEXTS

PARTS = st.sampled_from(["\0", "ab", "abc", "é", "“", "漢字", "👩", "x" * 9, "the river "])
RELATED = st.lists(PARTS, max_size=12).map("".join)


def exact(left: str, right: str, characters: int) -> float:
    return jaccard(shingles(left, characters), shingles(right, characters))


def compiled(left: str, right: str, characters: int) -> float:
    return similarity(shingle_keys(left, characters), shingle_keys(right, characters))


@settings(max_examples=300)
@given(left=RELATED | TEXTS, right=RELATED | TEXTS, characters=st.sampled_from([1, 2, 5, 8, 13]))
def test_similarity_is_that_of_sets_of_strings(left: str, right: str, characters: int) -> None:
    assert compiled(left, right, characters) == exact(left, right, characters)


def test_similarity_of_long_texts() -> None:
    rng = np.random.default_rng(0)
    letters = np.array([*map(chr, range(0x100, 0x100 + 3000))])
    left = "".join(rng.choice(letters, 20_000))
    right = left[:10_000] + "".join(rng.choice(letters, 10_000))
    assert compiled(left, right, 5) == exact(left, right, 5)


@given(text=TEXTS, characters=st.integers(1, 13))
def test_packed_shingles_stand_where_the_text_has_them(text: str, characters: int) -> None:
    data = as_bytes(text)
    arrays = np.zeros(7, np.uint64), np.zeros(7, np.int64), np.zeros(7, np.int64)
    start, end = 0, first_end(data, characters)
    found: dict[str, int] = {}
    place = 0
    while end <= len(data):
        count, start, end = pack(data, start, end, *arrays)
        for key, first, last in zip(*(array[:count].tolist() for array in arrays), strict=True):
            shingle = data[first:last].tobytes().decode("utf-8", "surrogatepass")
            assert shingle == text[place : place + characters]
            assert found.setdefault(shingle, key) == key
            place += 1
    assert place == max(0, len(text) - characters + 1)
    short = [key for shingle, key in found.items() if len(shingle.encode("utf-8", "surrogatepass")) <= 8]
    assert len(set(short)) == len(short)
    assert set(short).isdisjoint(set(found.values()) - set(short))


def test_texts_are_remembered_within_their_bound() -> None:
    texts = [sentences(4, seed) for seed in range(10)]
    read: list[int] = []

    def text_of(number: int) -> str:
        read.append(number)
        return texts[number]

    sizes = [shingle_keys(text, 5).nbytes for text in texts]
    remembered = ShingledTexts(text_of, 5, cache_bytes=sum(sizes[:3]))
    for left, right in ((0, 1), (1, 0), (2, 0), (0, 1)):
        assert remembered.similarity(left, right) == exact(texts[left], texts[right], 5)
    assert read == [0, 1, 2]
    remembered[9]
    assert len(remembered._cached) < 4
    remembered[2]
    assert read == [0, 1, 2, 9, 2]
