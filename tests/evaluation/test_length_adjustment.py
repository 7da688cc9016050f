"""Perplexity per token turned into perplexity per word."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.ablations import length_adjusted_perplexity
from lineage.errors import BadInput


def test_the_posts_example() -> None:
    assert length_adjusted_perplexity(26.25, 1950, 1699) == pytest.approx(42.5, abs=0.1)


@given(perplexity=st.floats(1, 1e4), tokens=st.integers(1, 10**6), words=st.integers(1, 10**6))
def test_the_text_stays_as_likely(perplexity: float, tokens: int, words: int) -> None:
    if tokens <= 10 * words:
        there = length_adjusted_perplexity(perplexity, tokens, words)
        assert length_adjusted_perplexity(there, words, tokens) == pytest.approx(perplexity, rel=1e-9)


@pytest.mark.parametrize("values", [(0.5, 1, 1), (2.0, 0, 1), (2.0, 1, -1), (float("nan"), 1, 1)])
def test_impossible_values_are_refused(values: tuple[float, float, float]) -> None:
    with pytest.raises(BadInput, match="is impossible"):
        length_adjusted_perplexity(*values)
