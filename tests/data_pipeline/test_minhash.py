"""Signatures against datasketch, SHA-1 against the standard library, similarity against sets of
strings."""

import hashlib
import random
import struct

import numpy as np
import pytest
from datasketch import MinHash
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_repro.data_pipeline.duplicates.similarity import ShingledTexts, shingle_keys
from mlm_repro.data_pipeline.fast.minhash import (
    LANES,
    LONGEST,
    sha1_hashes32,
    signature,
    working_space,
)
from mlm_repro.data_pipeline.fast.shingles import as_bytes, first_end, pack, shingles
from tests.data_pipeline.conftest import jaccard, sentences

ALPHABET = st.one_of(
    st.characters(),
    st.sampled_from("\0\t\n aé“”’\u07ff\u0800\uffff\U00010000\U0010ffff\u0301\u200d👩漢ß"),
    st.characters(codec="ascii"),
)
TEXTS = st.one_of(st.text(ALPHABET, max_size=60), st.text("ab\0", max_size=30))


def by_datasketch(text: str, permutations: int, characters: int) -> MinHash:
    """datasketch over the text's shingles, one at a time, with datasketch's own permutations."""
    sketch = MinHash(num_perm=permutations, seed=1, scheme="affine32")
    for start in range(max(1, len(text) - characters + 1)):
        sketch.update(text[start : start + characters].encode("utf-8", "surrogatepass"))
    return sketch


@given(text=TEXTS, characters=st.sampled_from([1, 2, 5, 9, 13]))
def test_signature_is_datasketchs(text: str, characters: int) -> None:
    expected = by_datasketch(text, 32, characters).hashvalues
    assert np.array_equal(signature(text, 32, characters), expected)


@pytest.mark.parametrize(
    "text", ["", "abc", "\0" * 9, sentences(30, 5), "漢字かな" * 700, "a\ud800b\udfffc" * 3]
)
def test_signature_of_the_default_length_is_datasketchs(text: str) -> None:
    assert np.array_equal(signature(text, 125), by_datasketch(text, 125, 5).hashvalues)


def test_a_text_of_many_chunks_and_a_full_table(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    text = "".join(map(chr, rng.integers(32, 0x24F, 60_000)))
    update = MinHash(num_perm=16, seed=1, scheme="affine32")
    update.update_batch({text[start : start + 5].encode() for start in range(len(text) - 4)})
    assert np.array_equal(signature(text, 16), update.hashvalues)


@given(
    strings=st.lists(st.binary(max_size=LONGEST), max_size=2 * LANES + 1),
    chosen=st.randoms(use_true_random=False),
)
def test_sha1_is_the_standard_librarys(strings: list[bytes], chosen: random.Random) -> None:
    ends = np.cumsum([len(string) for string in strings], dtype=np.int64)
    starts = ends - np.array([len(string) for string in strings], np.int64)
    data = np.frombuffer(b"".join(strings) + b"\xff", np.uint8)
    numbers = [number for number in range(len(strings)) if chosen.random() < 0.8]
    hashes = np.zeros(len(strings), np.uint32)
    sha1_hashes32(data, starts, ends, np.array(numbers, np.int64), hashes, *working_space())
    expected = {
        number: struct.unpack("<I", hashlib.sha1(strings[number]).digest()[:4])[0]
        for number in numbers
    }
    assert hashes.tolist() == [expected.get(number, 0) for number in range(len(strings))]


PARTS = st.sampled_from(["\0", "ab", "abc", "é", "“", "漢字", "👩", "x" * 9, "the river "])
RELATED = st.lists(PARTS, max_size=12).map("".join)


def exact(left: str, right: str, characters: int) -> float:
    return jaccard(shingles(left, characters), shingles(right, characters))


def compiled(left: str, right: str, characters: int) -> float:
    return float(ShingledTexts([left, right].__getitem__, characters).similarities(0, [1], 2.0)[0])


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
    short = [
        key for shingle, key in found.items() if len(shingle.encode("utf-8", "surrogatepass")) <= 8
    ]
    assert len(set(short)) == len(short)
    assert set(short).isdisjoint(set(found.values()) - set(short))


@pytest.mark.parametrize("fitting", [3, 7, 100])
def test_texts_are_remembered_within_their_bound(fitting: int) -> None:
    """Whatever fits, each answer is exact; where all fit, each text is read once as a candidate."""
    rng = random.Random(fitting)
    texts = [sentences(rng.randrange(1, 9), seed) for seed in range(30)]
    read: list[int] = []

    def text_of(number: int) -> str:
        read.append(number)
        return texts[number]

    most = max(len(shingle_keys(text, 5)) for text in texts) * fitting
    remembered = ShingledTexts(text_of, 5, most)
    for number in range(len(texts)):
        others = sorted(rng.sample(range(30), 12))
        found = remembered.similarities(number, others, 2.0)
        assert found.tolist() == [exact(texts[number], texts[other], 5) for other in others]
        assert len(remembered._keys) == most
    assert len(read) > 60 if fitting < 100 else len(read) == 30


@pytest.mark.parametrize("most", [1, 1 << 20])
def test_texts_with_more_keys_than_there_is_room_for_are_compared(most: int) -> None:
    texts = [sentences(count, count) for count in (3, 20, 5, 60)]
    found = ShingledTexts(texts.__getitem__, 5, most).similarities(0, range(4), 2.0)
    assert found.tolist() == [exact(texts[0], text, 5) for text in texts]
