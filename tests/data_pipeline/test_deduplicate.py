"""Near-duplicates against a comparison of all pairs."""

import random

import numpy as np
import pytest
from datasketch import MinHash
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.deduplicate import find_duplicates
from data_pipeline.minhash import signature
from data_pipeline.shingles import jaccard, shingles
from tests.data_pipeline.conftest import WORDS, sentences


def survivors(texts: list[str], threshold: float = 0.7) -> list[int]:
    return find_duplicates(map(signature, texts), texts.__getitem__, threshold).survivor


def survivors_of_all_pairs(texts: list[str], threshold: float = 0.7) -> list[int]:
    """The first member of each connected component of the exact similarity graph."""
    sets = [{text[i : i + 5] for i in range(len(text) - 4)} for text in texts]
    label = list(range(len(texts)))
    for i in range(len(texts)):
        for j in range(i):
            if len(sets[i] & sets[j]) >= threshold * len(sets[i] | sets[j]):
                old, new = max(label[i], label[j]), min(label[i], label[j])
                label = [new if value == old else value for value in label]
    return label


def edited(text: str, words: int, rng: random.Random) -> str:
    parts = text.split(" ")
    for _ in range(words):
        parts[rng.randrange(len(parts))] = rng.choice(WORDS)
    return " ".join(parts)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_planted_duplicates_give_the_groups_of_all_pairs(seed: int) -> None:
    rng = random.Random(seed)
    texts = [sentences(25, rng.randrange(10**6)) for _ in range(12)]
    for _ in range(8):
        texts.append(edited(rng.choice(texts), rng.randint(0, 2), rng))
    rng.shuffle(texts)
    assert survivors(texts) == survivors_of_all_pairs(texts)


def test_first_in_input_order_survives_through_a_chain() -> None:
    words = sentences(40, 1).split(" ")
    chain = [" ".join([f"new{n}" for n in range(10 * step)] + words[10 * step :]) for step in range(12)]
    assert jaccard(shingles(chain[0]), shingles(chain[-1])) < 0.7
    texts = [sentences(40, 2), *reversed(chain), sentences(40, 3), chain[0]]
    assert survivors(texts) == [0, *[1] * 12, 13, 1]
    assert survivors(texts) == survivors_of_all_pairs(texts)


def test_candidates_are_verified() -> None:
    texts = [sentences(20, 1), sentences(20, 2), sentences(20, 1)]
    same = np.zeros(128, np.uint32)
    found = find_duplicates([same] * 3, texts.__getitem__)
    assert found.candidate_pairs == 3
    assert found.survivor == [0, 1, 0]
    assert found.bands * found.rows <= 128


def test_threshold_is_inclusive() -> None:
    texts = ["abcde", "abcdef"]
    assert jaccard(shingles(texts[0]), shingles(texts[1])) == 0.5
    same = [np.zeros(128, np.uint32)] * 2
    assert find_duplicates(same, texts.__getitem__, 0.5).survivor == [0, 0]
    assert find_duplicates(same, texts.__getitem__, 0.51).survivor == [0, 1]


@pytest.mark.parametrize("text", ["", "abc", "naïve café 漢字", sentences(30, 5)])
def test_signature_is_datasketchs(text: str) -> None:
    plain = MinHash(num_perm=128, seed=1, scheme="affine32")
    for start in range(max(1, len(text) - 4)):
        plain.update(text[start : start + 5].encode("utf-8"))
    assert np.array_equal(signature(text), plain.hashvalues)


@given(left=st.text(max_size=40), right=st.text(max_size=40))
def test_jaccard_is_a_similarity(left: str, right: str) -> None:
    a, b = shingles(left), shingles(right)
    assert 0 <= jaccard(a, b) == jaccard(b, a) <= 1
    assert jaccard(a, a) == 1
    assert (jaccard(a, b) == 1) == (a == b)
