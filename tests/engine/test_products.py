"""`linear` and `multiply` are torch's, in value and gradients, by whichever library multiplies."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mlm_repro.engine.kernels import products
from mlm_repro.engine.kernels.products import linear, multiply

SIZES = st.integers(0, 9)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def results(
    function: Callable[..., torch.Tensor], operands: list[torch.Tensor], upstream: torch.Tensor
) -> list[torch.Tensor]:
    leaves = [each.detach().requires_grad_() for each in operands]
    output = function(*leaves)
    output.backward(upstream)
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    st.lists(SIZES, max_size=2),
    SIZES.filter(bool),
    SIZES.filter(bool),
    st.booleans(),
    st.booleans(),
)
def test_value_and_gradients_are_those_of_exact_arithmetic(
    dtype: torch.dtype, rows: list[int], inner: int, outer: int, has_bias: bool, is_strided: bool
) -> None:
    torch.manual_seed(0)
    x, weight, upstream = (
        torch.randn(*rows, inner),
        torch.randn(outer, inner),
        torch.randn(*rows, outer),
    )
    if is_strided:
        x = torch.stack([x, x], dim=-1)[..., 0]
        weight = weight.t().contiguous().t()
    operands = [each.to(dtype) for each in (x, weight, *([torch.randn(outer)] if has_bias else []))]
    found = results(linear, operands, upstream.to(dtype))
    exact = results(F.linear, [each.double() for each in operands], upstream.to(dtype).double())
    for ours, true in zip(found, exact, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(
            ours.double(), true, rtol=8 * torch.finfo(dtype).eps, atol=80 * torch.finfo(dtype).eps
        )


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    st.lists(st.integers(0, 2), max_size=3), SIZES.filter(bool), SIZES, st.booleans(), st.booleans()
)
def test_without_gradient_a_row_alone_is_multiplied_as_exactly(
    dtype: torch.dtype, rows: list[int], inner: int, outer: int, has_bias: bool, is_strided: bool
) -> None:
    torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(*rows, inner),
        torch.randn(outer, inner),
        torch.randn(outer) if has_bias else None,
    )
    if is_strided:
        x = torch.stack([x, x], dim=-1)[..., 0]
        weight = weight.t().contiguous().t()
    operands = [None if each is None else each.to(dtype) for each in (x, weight, bias)]
    found, exact = (
        linear(*operands),
        F.linear(*(None if each is None else each.double() for each in operands)),
    )  # type: ignore[arg-type]
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), exact, rtol=8 * torch.finfo(dtype).eps, atol=80 * torch.finfo(dtype).eps
    )


class Multiplied(TorchDispatchMode):
    """The dtypes of what a library multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes = set[torch.dtype]()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if "mm" in str(operator) or "linear" in str(operator):
            self.dtypes |= {each.dtype for each in args if isinstance(each, torch.Tensor)}
        return operator(*args, **kwargs or {})


def test_a_processor_without_bf16_multiplies_float32_and_rounds_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "multiplies_bf16", False)
    torch.manual_seed(0)
    operands = [torch.randn(*shape).bfloat16() for shape in ((2, 300, 40), (50, 40), (50,))]
    upstream = torch.randn(2, 300, 50).bfloat16()
    x, weight, _ = operands
    with Multiplied() as multiplied:
        found = [*results(linear, operands, upstream)[:3], multiply(x, weight.t())]
    assert multiplied.dtypes == {torch.float32}
    exact = [
        *results(F.linear, [each.double() for each in operands], upstream.double())[:3],
        F.linear(x.double(), weight.double()),
    ]
    for ours, true in zip(found, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        # One rounding to bf16; those in float32, of up to 600 numbers, are far smaller.
        torch.testing.assert_close(ours.double(), true, rtol=2**-8, atol=1e-4)
