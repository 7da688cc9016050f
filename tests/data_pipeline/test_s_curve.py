"""The S-curve against its closed form, published values and simulation."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.config import DeduplicateConfig
from data_pipeline.duplicates.lsh import HISTOGRAM_BINS, describe, histogram, recall
from data_pipeline.files import NearDuplicates


@given(similarity=st.floats(0, 1), bands=st.integers(1, 40), rows=st.integers(1, 12))
def test_recall_is_the_closed_form(similarity: float, bands: int, rows: int) -> None:
    assert recall(similarity, bands, rows) == pytest.approx(1 - (1 - similarity**rows) ** bands, abs=1e-9)


@pytest.mark.parametrize(("similarity", "expected"), [(0.7, 0.2491), (0.8, 0.6789), (0.9, 0.9863)])
def test_published_banding(similarity: float, expected: float) -> None:
    assert recall(similarity, 10, 10) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("similarity", [0.3, 0.5, 0.6, 0.75])
def test_required_agreement_is_part_of_the_curve(similarity: float) -> None:
    bands, rows, required = 8, 3, 13
    agree = np.random.default_rng(0).random((200_000, bands, rows)) < similarity
    found = agree.all(2).any(1) & (agree.sum((1, 2)) >= required)
    assert recall(similarity, bands, rows, required) == pytest.approx(found.mean(), abs=0.005)


def test_default_banding_keeps_its_promise() -> None:
    config = DeduplicateConfig()
    banding = (config.bands, config.rows, config.min_agreement)
    assert recall(0.7, *banding) > 0.989
    assert recall(0.75, *banding) > 0.998
    assert recall(0.7, config.bands, config.rows) - recall(0.7, *banding) < 1e-6
    assert recall(0.15, config.bands, config.rows) > 1e-3
    assert recall(0.15, *banding) < 1e-9


def test_histogram_bins_are_twentieths() -> None:
    counts = histogram([0.0, 0.049, 0.7, 0.74, 0.75, 1.0])
    assert {number: int(count) for number, count in enumerate(counts) if count} == {0: 2, 14: 2, 15: 1, 19: 1}
    assert len(counts) == HISTOGRAM_BINS
    assert histogram([]).sum() == 0


def test_description_is_plain_data() -> None:
    found = describe(DeduplicateConfig(), histogram([0.72, 0.9]))
    assert NearDuplicates.model_validate(json.loads(json.dumps(found.to_json()))) == found
    assert found.compared_pairs == 2
    assert found.s_curve[15] == (0.75, recall(0.75, 25, 5, found.min_agreement))
    published = describe(DeduplicateConfig(rule="megatron-2019", bands=10, rows=10), histogram([]))
    assert published.min_agreement == 0
    assert published.expected_recall["0.7"] == pytest.approx(0.2491, abs=5e-5)
