"""Buckets against datasketch's index, components against networkx, the S-curve against its closed
form."""

import json
import random
from collections.abc import Iterable
from itertools import combinations, pairwise

import networkx
import numpy as np
import pytest
from datasketch import MinHashLSH
from hypothesis import given
from hypothesis import strategies as st

from mlm_repro.data_pipeline.config import DeduplicateConfig
from mlm_repro.data_pipeline.duplicates.lsh import (
    HISTOGRAM_BINS,
    Compared,
    agreement,
    band_keys,
    buckets,
    describe,
    recall,
    required_agreement,
    sketch,
)
from mlm_repro.data_pipeline.duplicates.near_duplicates import flatten, link, merge
from mlm_repro.data_pipeline.fast.minhash import as_sketch, signature
from mlm_repro.data_pipeline.files import NearDuplicates
from tests.data_pipeline.conftest import WORDS, sentences

SHARES_A_BAND = DeduplicateConfig(rule="megatron-2019", bands=25, rows=5)


def edited(text: str, share: float, rng: random.Random) -> str:
    """The text with this share of its words replaced."""
    return " ".join(rng.choice(WORDS) if rng.random() < share else word for word in text.split(" "))


def related_texts(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    texts = [sentences(20, rng.randrange(10**6)) for _ in range(count // 4)]
    while len(texts) < count:
        texts.append(edited(rng.choice(texts), rng.random() * 0.2, rng))
    return texts


def components(
    bands: Iterable[np.ndarray], sketches: np.ndarray, config: DeduplicateConfig
) -> np.ndarray:
    """First document of each document's component."""
    forest = np.arange(len(sketches))
    for keys in bands:
        link(
            forest,
            *buckets(keys),
            sketches,
            required_agreement(config),
            np.zeros(len(forest), np.bool_),
        )
    return flatten(forest)


def pairs_of(found: tuple[np.ndarray, np.ndarray]) -> set[tuple[int, int]]:
    documents, starts = found
    return {
        pair
        for start, end in pairwise(starts)
        for pair in combinations(documents[start:end].tolist(), 2)
    }


@pytest.mark.parametrize(("bands", "rows"), [(25, 5), (10, 10), (4, 2), (2, 1)])
def test_candidate_pairs_are_datasketchs(bands: int, rows: int) -> None:
    texts = related_texts(bands, 120)
    minima = [signature(text, bands * rows) for text in texts]
    index = MinHashLSH(num_perm=bands * rows, params=(bands, rows))
    for number, values in enumerate(minima):
        index.insert(number, as_sketch(values, bands * rows))
    expected = {
        (number, other)
        for number, values in enumerate(minima)
        for other in index.query(as_sketch(values, bands * rows))
        if number < other
    }
    keys = band_keys(np.stack(minima), bands)
    found = set().union(*(pairs_of(buckets(keys[:, band])) for band in range(bands)))
    assert found == expected
    assert len(expected) > 10

    config = SHARES_A_BAND.model_copy(update={"bands": bands, "rows": rows})
    sketches = np.stack([sketch(values) for values in minima])
    assert sets_of(components(keys.T, sketches, config)) == sets_of_graph(len(texts), expected)


@given(
    keys=st.lists(st.sampled_from([0, 1, 2**60, 2**63, 2**64 - 1, 2**64 - 2, 5 << 60]), max_size=40)
)
def test_buckets_hold_equal_keys_in_order(keys: list[int]) -> None:
    documents, starts = buckets(np.array(keys, np.uint64))
    found = [documents[start:end].tolist() for start, end in pairwise(starts)]
    expected = [
        [number for number, key in enumerate(keys) if key == one] for one in sorted(set(keys))
    ]
    assert found == [bucket for bucket in expected if len(bucket) > 1]


@given(
    left=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    right=st.lists(st.integers(0, 3), min_size=40, max_size=40),
)
def test_agreement_counts_equal_minima(left: list[int], right: list[int]) -> None:
    right = right[: len(left)]
    pair = sketch(np.array(left, np.uint32)), sketch(np.array(right, np.uint32))
    filling = -len(left) % 8
    assert agreement(*pair) - filling == sum(a == b for a, b in zip(left, right, strict=True))


def sets_of(forest: np.ndarray) -> set[frozenset[int]]:
    found: dict[int, set[int]] = {}
    for document, first in enumerate(forest.tolist()):
        found.setdefault(first, set()).add(document)
    assert all(min(members) == first for first, members in found.items())
    return {frozenset(members) for members in found.values()}


def sets_of_graph(count: int, pairs: set[tuple[int, int]]) -> set[frozenset[int]]:
    graph = networkx.Graph(list(pairs))
    graph.add_nodes_from(range(count))
    return {frozenset(members) for members in networkx.connected_components(graph)}


@given(
    data=st.data(), count=st.integers(1, 30), bands=st.integers(1, 4), required=st.integers(0, 4)
)
def test_components_are_those_of_the_graph_of_agreeing_pairs(
    data: st.DataObject, count: int, bands: int, required: int
) -> None:
    keys = np.array(
        data.draw(
            st.lists(
                st.lists(st.integers(0, 5), min_size=count, max_size=count),
                min_size=bands,
                max_size=bands,
            )
        ),
        np.uint64,
    )
    minima = np.array(
        data.draw(
            st.lists(
                st.lists(st.integers(0, 1), min_size=4, max_size=4), min_size=count, max_size=count
            )
        ),
        np.uint32,
    )
    config = DeduplicateConfig(bands=1, rows=4, threshold=1)
    assert required_agreement(config) == 4 + 4
    config = Demanding(bands=1, rows=4, demanded=required, min_recall=0)
    pairs = {
        pair
        for band in keys
        for pair in pairs_of(buckets(band))
        if (minima[pair[0]] == minima[pair[1]]).sum() >= required
    }
    sketches = np.stack([sketch(values) for values in minima])
    expected = sets_of_graph(count, pairs)
    assert sets_of(components(keys, sketches, config)) == expected
    forests = [np.arange(count) for _ in keys]
    for forest, band in zip(forests, keys, strict=True):
        link(
            forest, *buckets(band), sketches, required_agreement(config), np.zeros(count, np.bool_)
        )
    for forest in forests[1:]:
        merge(forests[0], np.arange(count), forest)
    assert sets_of(flatten(forests[0])) == expected


def test_a_later_document_is_not_compared_with_one_that_is_linked_to_none() -> None:
    """The second document has nothing in common with the first; the third is like both and is
    offered the first."""
    minima = np.array([[0, 0, 0, 0, 0, 0, 1, 0], [0, 1, 1, 1, 1, 1, 0, 1], [0] * 8], np.uint32)
    sketches, partly = np.stack([sketch(values) for values in minima]), np.zeros(3, np.bool_)
    left, _ = link(np.arange(3), np.arange(3), np.array([0, 3]), sketches, 2, partly, 1)
    assert (left, np.flatnonzero(partly).tolist()) == (1, [2])


@given(data=st.data(), count=st.integers(1, 40), most=st.integers(1, 5), required=st.integers(1, 4))
def test_full_buckets_link_as_all_pairs_do_or_it_is_said(
    data: st.DataObject, count: int, most: int, required: int
) -> None:
    keys = np.array(
        data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)), np.uint64
    )
    minima = np.array(
        data.draw(
            st.lists(
                st.lists(st.integers(0, 2), min_size=8, max_size=8), min_size=count, max_size=count
            )
        ),
        np.uint32,
    )
    sketches = np.stack([sketch(values) for values in minima])
    forests, partly, left = [np.arange(count) for _ in range(2)], np.zeros(count, np.bool_), []
    for forest, offered in zip(forests, (count, most), strict=True):
        left.append(link(forest, *buckets(keys), sketches, required, partly, offered)[0])
    whole, part = (flatten(forest).tolist() for forest in forests)
    assert left[0] == 0
    assert (left[1] > 0) == partly.any()
    assert whole == part or left[1] > 0
    assert not partly.any() or max(np.bincount(keys.astype(np.int64))) > most + 1


class Demanding(DeduplicateConfig):
    """A configuration whose agreement is chosen."""

    demanded: int

    @property
    def min_agreement(self) -> int:
        return self.demanded


def test_a_bucket_of_many_near_duplicates_is_linked_quickly() -> None:
    minima = np.random.default_rng(0).integers(0, 256, 128).astype(np.uint32)
    rows = np.repeat(minima[None], 100_000, 0)
    rows[np.arange(100_000), np.arange(100_000) % 128] += 1
    sketches = rows.astype(np.uint8).view(np.uint64)
    forest = components(
        [np.zeros(100_000, np.uint64)] * 25, sketches, DeduplicateConfig(bands=25, rows=5)
    )
    assert not forest.any()
    alone, partly = np.arange(5000), np.zeros(5000, np.bool_)
    bucket = alone.copy(), np.array([0, 5000])
    assert link(alone, *bucket, sketches, 100, partly) == (0, 0)  # one set: nothing is left out
    unlike = np.random.default_rng(0).integers(0, 2**63, (5000, 16)).astype(np.uint64)
    later = 5000 - 4096
    compared = 5000 * 4999 // 2 - later * (later - 1) // 2
    assert link(np.arange(5000), *bucket, unlike, 100, partly) == (
        later * (later - 1) // 2,
        compared,
    )
    assert np.flatnonzero(partly).tolist() == list(range(4097, 5000))


@given(similarity=st.floats(0, 1), bands=st.integers(1, 40), rows=st.integers(1, 12))
def test_recall_is_the_closed_form(similarity: float, bands: int, rows: int) -> None:
    assert recall(similarity, bands, rows) == pytest.approx(
        1 - (1 - similarity**rows) ** bands, abs=1e-9
    )


@pytest.mark.parametrize("similarity", [0.3, 0.5, 0.6, 0.75])
def test_required_agreement_is_part_of_the_curve(similarity: float) -> None:
    bands, rows, required = 8, 3, 13
    agree = np.random.default_rng(0).random((200_000, bands, rows)) < similarity
    found = agree.all(2).any(1) & (agree.sum((1, 2)) >= required)
    assert recall(similarity, bands, rows, required) == pytest.approx(found.mean(), abs=0.005)


@pytest.mark.parametrize("threshold", [0.4, 0.7, 0.9])
def test_banding_of_a_threshold_keeps_its_promise(threshold: float) -> None:
    config = DeduplicateConfig(threshold=threshold)
    assert recall(threshold, *config.banding, config.min_agreement) > 0.9999 - 1e-5
    assert recall(threshold - 0.35, *config.banding) > 0.1
    assert recall(threshold - 0.35, *config.banding, config.min_agreement) < 1e-3


def test_description_is_plain_data() -> None:
    found = describe(
        DeduplicateConfig(), Compared(np.bincount([14, 18], minlength=HISTOGRAM_BINS), 3, 1200)
    )
    assert NearDuplicates.model_validate(json.loads(json.dumps(found.to_json()))) == found
    assert found.compared_pairs == 2
    assert found.left_out.startswith("3 documents were not compared")
    assert "at most 1,200 pairs" in found.left_out
    assert found.s_curve[15] == (0.75, recall(0.75, 51, 5, found.min_agreement))
    nothing = Compared(np.zeros(HISTOGRAM_BINS, np.int64))
    published = describe(DeduplicateConfig(rule="megatron-2019", bands=10, rows=10), nothing)
    assert published.left_out == ""
    assert published.min_agreement == 0
    assert published.expected_recall["0.7"] == pytest.approx(0.2491, abs=5e-5)
