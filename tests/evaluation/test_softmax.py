"""One pass over logits finds what exact arithmetic does, and a number that is none stays none."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evaluation.softmax import TOGETHER, sum_exponentials

WIDTHS = st.sampled_from([1, 2, TOGETHER - 1, TOGETHER, TOGETHER + 1, 3 * TOGETHER + 7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@given(st.integers(1, 5), st.integers(0, 9), WIDTHS, st.integers(0, 9), st.floats(0.01, 100), st.integers(0, 2**31))
def test_the_columns_and_no_others_are_added_up(
    dtype: torch.dtype, rows: int, before: int, width: int, after: int, scale: float, seed: int
) -> None:
    torch.manual_seed(seed)
    logits = (torch.randn(rows, before + width + after) * scale).to(dtype)
    highest, total = sum_exponentials(logits, slice(before, before + width))
    some = logits[:, before : before + width].float()
    assert torch.equal(highest, some.amax(dim=1))
    torch.testing.assert_close(total, (some.double() - highest.double()[:, None]).exp().sum(dim=1), rtol=1e-6, atol=0)


def test_no_columns_are_nothing() -> None:
    highest, total = sum_exponentials(torch.randn(2, 5), slice(3, 3))
    assert highest.tolist() == [-math.inf] * 2
    assert total.tolist() == [0.0] * 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_none_is_not_hidden(value: float) -> None:
    logits = torch.randn(2, 3000)
    logits[1, 2500] = value
    _, total = sum_exponentials(logits, slice(0, 3000))
    assert total.isnan().tolist() == [False, True]
