"""Signatures against datasketch, and SHA-1 against the standard library."""

import hashlib
import random
import struct

import numpy as np
import pytest
from datasketch import MinHash
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.fast import minhash
from data_pipeline.fast.minhash import signature
from data_pipeline.fast.sha1 import LANES, LONGEST, sha1_hashes32, working_space
from tests.data_pipeline.conftest import sentences

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


@pytest.mark.parametrize("text", ["", "abc", "\0" * 9, sentences(30, 5), "漢字かな" * 700, "a\ud800b\udfffc" * 3])
def test_signature_of_the_default_length_is_datasketchs(text: str) -> None:
    assert np.array_equal(signature(text, 125), by_datasketch(text, 125, 5).hashvalues)


def test_a_text_of_many_chunks_and_a_full_table(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    text = "".join(map(chr, rng.integers(32, 0x24F, 60_000)))
    update = MinHash(num_perm=16, seed=1, scheme="affine32")
    update.update_batch({text[start : start + 5].encode() for start in range(len(text) - 4)})
    assert np.array_equal(signature(text, 16), update.hashvalues)


def test_a_fast_path_that_differs_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(minhash, "_signature", lambda data, characters, multipliers, *_: multipliers)
    text = sentences(3, 1)
    assert np.array_equal(signature(text, 7), by_datasketch(text, 7, 5).hashvalues)
    assert "the fast MinHash differs on" in capsys.readouterr().err
    minhash._signer.cache_clear()


@given(strings=st.lists(st.binary(max_size=LONGEST), max_size=2 * LANES + 1), chosen=st.randoms(use_true_random=False))
def test_sha1_is_the_standard_librarys(strings: list[bytes], chosen: random.Random) -> None:
    ends = np.cumsum([len(string) for string in strings], dtype=np.int64)
    starts = ends - np.array([len(string) for string in strings], np.int64)
    data = np.frombuffer(b"".join(strings) + b"\xff", np.uint8)
    numbers = [number for number in range(len(strings)) if chosen.random() < 0.8]
    hashes = np.zeros(len(strings), np.uint32)
    sha1_hashes32(data, starts, ends, np.array(numbers, np.int64), hashes, *working_space())
    expected = {number: struct.unpack("<I", hashlib.sha1(strings[number]).digest()[:4])[0] for number in numbers}
    assert hashes.tolist() == [expected.get(number, 0) for number in range(len(strings))]
