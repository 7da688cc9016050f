"""Fused kernels are as exact as the same-precision reference, both held against float64, and drop what it drops."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from engine.kernels import attention, cross_entropy, dropout
from engine.kernels.registry import DTYPES, KERNELS, REFERENCE, implementation, kernel
from engine.parallel.mesh import Axis
from engine.rng import DropoutMask

Inputs = tuple[list[torch.Tensor], tuple[Any, ...]]
"""Tensors with a gradient, and other arguments."""


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64) * scale


def attention_inputs(s: int, b: int, n: int, d: int, probability: float, is_causal: bool) -> Inputs:
    mask = DropoutMask(probability, tuple(range(5, 5 + b)), first_row=3 * s) if probability else None
    visible = None
    if not is_causal:
        visible = torch.rand(b, s, s) < 0.6
        visible[:, :, 0] = True
    return [random(s, b, n, 3, d)], (mask, visible)


def cross_entropy_inputs(n: int, h: int, v: int, vocab_size: int) -> Inputs:
    return [random(n, h), random(v, h, scale=0.3)], (torch.randint(0, vocab_size, (n,)), vocab_size, Axis())


def bias_gelu_inputs(*shape: int) -> Inputs:
    return [random(*shape, scale=4.0), random(shape[-1])], ()


def layer_norm_inputs(*shape: int) -> Inputs:
    return [random(*shape) + 1, random(shape[-1]) + 1, random(shape[-1])], (1e-5,)


def cases() -> Iterator[Any]:
    """Kernel, and inputs of odd shapes."""
    for shape in ((1, 1, 1, 4), (37, 2, 3, 8), (300, 1, 2, 16)):
        for probability in (0.0, 0.1):
            for is_causal in (True, False):
                name = f"attention-{'x'.join(map(str, shape))}-{probability}-{'causal' if is_causal else 'masked'}"
                yield pytest.param(
                    "attention", lambda a=(*shape, probability, is_causal): attention_inputs(*a), id=name
                )
    for sizes in ((1, 3, 5, 5), (37, 24, 96, 91), (50, 7, 33, 20)):
        name = f"linear_cross_entropy-{'x'.join(map(str, sizes))}"
        yield pytest.param("linear_cross_entropy", lambda a=sizes: cross_entropy_inputs(*a), id=name)
    for shape in ((1, 1, 1), (5, 2, 37), (3, 1, 300)):
        name = "x".join(map(str, shape))
        mask = DropoutMask(0.1, tuple(range(shape[1])), first_row=4)
        yield pytest.param("dropout", lambda a=shape, m=mask: ([random(*a)], (m,)), id=f"dropout-{name}")
        yield pytest.param("bias_gelu", lambda a=shape: bias_gelu_inputs(*a), id=f"bias_gelu-{name}")
        yield pytest.param("layer_norm", lambda a=shape: layer_norm_inputs(*a), id=f"layer_norm-{name}")
        for dropping in (None, mask):
            yield pytest.param(
                "bias_dropout_add",
                lambda a=shape, m=dropping: ([random(*a), random(a[-1]), random(*a)], (m,)),
                id=f"bias_dropout_add-{name}-{'masked' if dropping else 'whole'}",
            )


def run(
    function: Callable[..., torch.Tensor], tensors: list[torch.Tensor], others: tuple[Any, ...], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Output and gradients; inputs and the output's gradient are not contiguous."""
    leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in tensors]
    output = function(*(_spread(leaf) for leaf in leaves), *others)
    upstream = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    output.backward(_spread(upstream.to(torch.bfloat16).to(output.dtype)))
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same values at every second place of memory."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


@pytest.mark.parametrize("dtype", DTYPES["cpu"], ids=str)
@pytest.mark.parametrize(("name", "inputs"), list(cases()))
def test_a_kernel_is_as_exact_as_the_reference(
    name: str, inputs: Callable[[], Inputs], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 4000)
    monkeypatch.setattr(attention, "WORKSPACE_BYTES", 1 << 17)
    torch.manual_seed(0)
    tensors, others = inputs()
    tensors = [tensor.to(dtype).double() for tensor in tensors]
    exact = run(implementation(name, REFERENCE), tensors, others, torch.float64)
    reference = run(implementation(name, REFERENCE), tensors, others, dtype)
    fused = run(implementation(name, "cpu"), tensors, others, dtype)
    for true, theirs, ours in zip(exact, reference, fused, strict=True):
        assert ours.shape == true.shape
        assert ours.dtype == theirs.dtype
        unit = torch.finfo(dtype).eps * true.square().mean().sqrt().item()
        for error in (torch.Tensor.mean, torch.Tensor.max):
            allowed = 2 * error((theirs.double() - true).abs()).item() + unit / 2
            assert error((ours.double() - true).abs()).item() <= allowed


def test_every_fused_kernel_is_held_against_its_reference() -> None:
    assert {case.values[0] for case in cases()} == KERNELS.keys() - {"dropout_bits"}  # tests/engine/test_dropout.py


def test_what_a_device_has_no_kernel_for_goes_to_the_reference() -> None:
    assert kernel("attention", torch.empty(0, dtype=torch.float64)) is attention.reference
    assert kernel("attention", torch.empty(0, device="meta")) is attention.reference
    assert kernel("attention", torch.empty(0)) is attention.blocked
    with pytest.raises(KeyError):
        kernel("no such kernel", torch.empty(0))


def test_attention_drops_the_elements_of_its_mask() -> None:
    """With equal scores and one-hot values the output is the mask itself."""
    s, n = 150, 2
    mask = DropoutMask(0.3, (99,), first_row=7)
    qkv = torch.zeros(s, 1, n, 3, s)
    qkv[:, 0, :, 2] = torch.eye(s).unsqueeze(1)
    weights = attention.blocked(qkv, mask).view(s, n, s).transpose(0, 1)
    seen = torch.ones(s, s).tril()
    keep = mask.keep(n * s, s, qkv.device).view(n, s, s)
    expected = keep * seen / seen.sum(dim=1, keepdim=True) / 0.7
    torch.testing.assert_close(weights, expected)
    assert (keep.double().mean() - 0.7).abs() < 0.01


def test_dropout_drops_the_elements_of_its_mask() -> None:
    mask = DropoutMask(0.3, (3, 4), first_row=7)
    kept = dropout.compiled(torch.ones(90, 2, 200), mask)
    torch.testing.assert_close(kept.transpose(0, 1), mask.keep(90, 200, kept.device) / 0.7)


def test_a_query_that_sees_no_key_gives_zero() -> None:
    visible = torch.ones(1, 5, 5, dtype=torch.bool)
    visible[0, 2] = False
    qkv = torch.randn(5, 1, 2, 3, 4, requires_grad=True)
    context = attention.blocked(qkv, DropoutMask(0.1, (1,)), visible)
    context.sum().backward()
    assert (context[2] == 0).all()
    assert qkv.grad is not None
    assert qkv.grad.isfinite().all()


def test_what_is_not_a_number_stays_so() -> None:
    """A loss that is not a number must be seen, whichever loop it went through."""
    qkv = torch.randn(20, 1, 1, 3, 4)
    qkv[3, 0, 0, 1, 0] = torch.nan
    assert attention.blocked(qkv, DropoutMask(0.0, (1,)))[3:].isnan().any(dim=-1).all()
    hidden, weight = torch.randn(4, 8), torch.randn(40, 8)
    hidden[1, 2] = torch.nan
    assert cross_entropy.chunked(hidden, weight, torch.zeros(4, dtype=torch.int64), 40, Axis()).isnan()
