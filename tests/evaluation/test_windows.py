"""Windows cover every target once, with the context the recipe gives it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlm_repro.evaluation.windows import evenly_spread, sliding_windows
from mlm_repro.lineage.errors import BadInput

shapes = st.integers(1, 40).flatmap(
    lambda seq_length: st.tuples(
        st.integers(2, 400), st.just(seq_length), st.integers(1, seq_length)
    )
)


@given(shapes)
def test_windows_are_those_of_the_definition(shape: tuple[int, int, int]) -> None:
    num_tokens, seq_length, stride = shape
    for number, window in enumerate(sliding_windows(num_tokens, seq_length, stride)):
        slots = range(seq_length) if number == 0 else range(seq_length - stride, seq_length)
        targets = [t for slot in slots if (t := number * stride + slot + 1) < num_tokens]
        assert window.start == number * stride
        assert window.stop == min(num_tokens, window.start + seq_length + 1)
        assert [*range(window.first_scored, window.stop)] == targets
        assert window.num_scored == len(targets) > 0


@pytest.mark.parametrize("stride", [0, -1, 9])
def test_a_stride_that_skips_targets_is_refused(stride: int) -> None:
    with pytest.raises(BadInput, match="stride"):
        sliding_windows(100, 8, stride)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_text_without_targets_is_refused(num_tokens: int) -> None:
    with pytest.raises(BadInput, match="nothing to score"):
        sliding_windows(num_tokens, 8, 2)


@given(st.integers(1, 500), st.integers(1, 600))
def test_spread_is_even(count: int, limit: int) -> None:
    chosen = evenly_spread(count, limit)
    assert len(chosen) == min(count, limit) == len(set(chosen))
    assert chosen == sorted(chosen)
    assert chosen[0] >= 0
    assert chosen[-1] < count
    gaps = [after - before for before, after in itertools.pairwise(chosen)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_spread_takes_the_middles_not_the_beginning() -> None:
    assert evenly_spread(100, 4) == [12, 37, 62, 87]
    assert evenly_spread(3, None) == [0, 1, 2]
