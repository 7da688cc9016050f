"""Fused kernels are as exact as the same-precision reference, both held against float64, and drop what it drops."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from engine.kernels import attention, cross_entropy
from engine.kernels.adam import AdamStep
from engine.kernels.registry import DTYPES, KERNELS, REFERENCE, implementation, kernel
from engine.parallel.mesh import Axis
from engine.rng import DropoutMask
from tests.engine.triton_interpreter import interpret

OnDevice = Callable[[str, str], Callable[..., torch.Tensor]]
"""(name, device) → what computes it there."""
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


def softmax_inputs(b: int, n: int, s: int, k: int, is_causal: bool) -> Inputs:
    visible = torch.rand(b, 1, s, k) < 0.6
    visible[..., 0] = True
    return [random(b, n, s, k, scale=3.0)], (0.3, None if is_causal else visible)


def bias_gelu_inputs(*shape: int) -> Inputs:
    return [random(*shape, scale=4.0), random(shape[-1])], ()


def layer_norm_inputs(*shape: int) -> Inputs:
    return [random(*shape) + 1, random(shape[-1]) + 1, random(shape[-1])], (1e-5,)


def cases() -> Iterator[Any]:
    """Kernel, and inputs of odd shapes."""
    for shape in ((1, 1, 1, 4), (37, 2, 3, 8), (140, 1, 2, 16)):
        for probability in (0.0, 0.1):
            for is_causal in (True, False):
                name = f"attention-{'x'.join(map(str, shape))}-{probability}-{'causal' if is_causal else 'masked'}"
                yield pytest.param(
                    "attention", lambda a=(*shape, probability, is_causal): attention_inputs(*a), id=name
                )
    for shape in ((1, 1, 1, 1), (2, 3, 5, 9), (1, 2, 3, 130)):
        for is_causal in (True, False):
            name = f"masked_softmax-{'x'.join(map(str, shape))}-{'causal' if is_causal else 'masked'}"
            yield pytest.param("masked_softmax", lambda a=(*shape, is_causal): softmax_inputs(*a), id=name)
    for sizes in ((1, 3, 5, 5), (37, 24, 96, 91), (50, 7, 33, 20)):
        name = f"linear_cross_entropy-{'x'.join(map(str, sizes))}"
        yield pytest.param("linear_cross_entropy", lambda a=sizes: cross_entropy_inputs(*a), id=name)
    for shape in ((1, 1, 1), (5, 2, 37), (3, 1, 300)):  # s, b, h
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


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> OnDevice:
    """A device's implementation of a kernel; a GPU's under Triton's interpreter."""

    def found(name: str, device: str) -> Callable[..., torch.Tensor]:
        if device == "cuda":
            interpret(monkeypatch)
        return implementation(name, device)

    return found


def cases_of_devices() -> Iterator[Any]:
    """Each case on every device that has an implementation of its own, in its number formats."""
    for case in cases():
        for device in (each for each in DTYPES if each in KERNELS[case.values[0]]):
            for dtype in DTYPES[device]:
                yield pytest.param(*case.values, device, dtype, id=f"{case.id}-{device}-{dtype}".replace("torch.", ""))


@pytest.mark.parametrize(("name", "inputs", "device", "dtype"), list(cases_of_devices()))
def test_a_kernel_is_as_exact_as_the_reference(
    name: str, inputs: Callable[[], Inputs], device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch,
    on_device: OnDevice,
) -> None:  # fmt: skip
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 4000)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 64)
    monkeypatch.setattr(attention, "WORKSPACE_BYTES", 1 << 17)
    torch.manual_seed(0)
    tensors, others = inputs()
    tensors = [tensor.to(dtype).double() for tensor in tensors]
    exact = run(implementation(name, REFERENCE), tensors, others, torch.float64)
    reference = run(implementation(name, REFERENCE), tensors, others, dtype)
    fused = run(on_device(name, device), tensors, others, dtype)
    for true, theirs, ours in zip(exact, reference, fused, strict=True):
        assert ours.shape == true.shape
        assert ours.dtype == theirs.dtype
        unit = torch.finfo(dtype).eps * true.square().mean().sqrt().item()
        for error in (torch.Tensor.mean, torch.Tensor.max):
            allowed = 2 * error((theirs.double() - true).abs()).item() + unit / 2
            assert error((ours.double() - true).abs()).item() <= allowed


def test_every_fused_kernel_is_held_against_its_reference() -> None:
    below = {"dropout_bits", "adamw", "adam_direction"}
    assert {case.values[0] for case in cases()} == KERNELS.keys() - below


@pytest.mark.parametrize("device", DTYPES)
@pytest.mark.parametrize("name", ["adamw", "adam_direction"])
def test_updates_are_as_exact_as_the_reference(name: str, device: str, on_device: OnDevice) -> None:
    """Weights, their bf16 copy and moments after three clipped updates, whose number is no multiple of a block."""

    def updated(update: Callable[..., Any], dtype: torch.dtype) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        weights, *gradients = torch.randn(4, 1500, generator=generator).to(dtype)
        moments, copy = torch.zeros(2, 1500, dtype=dtype), torch.zeros(1500, dtype=torch.bfloat16)
        for number, gradient in enumerate(gradients, 1):
            step = AdamStep(1e-2, 0.9, 0.999, 1e-8, 0.1, 0.3, number)
            if name == "adamw":
                update(weights, copy, gradient, *moments, step)
            else:
                direction = update(weights, gradient, *moments, step, number > 1)
                weights.sub_(direction, alpha=1e-2)
        return [weights, moments, copy]

    exact = updated(implementation(name, REFERENCE), torch.float64)
    reference = updated(implementation(name, REFERENCE), torch.float32)
    ours = updated(on_device(name, device), torch.float32)
    for true, theirs, fused in zip(exact[:2], reference, ours, strict=False):
        unit = torch.finfo(torch.float32).eps * true.abs().max().item()
        assert (fused - true).abs().max() <= 2 * (theirs - true).abs().max() + unit
    assert torch.equal(ours[2], ours[0].bfloat16() if name == "adamw" else exact[2])


def test_what_a_device_has_no_kernel_for_goes_to_the_reference() -> None:
    assert kernel("attention", torch.empty(0, dtype=torch.float64)) is attention.reference
    assert kernel("attention", torch.empty(0, device="meta")) is attention.reference
    assert kernel("attention", torch.empty(0)) is attention.blocked
    with pytest.raises(KeyError):
        kernel("no such kernel", torch.empty(0))


@pytest.mark.parametrize("device", DTYPES)
def test_attention_drops_the_elements_of_its_mask(device: str, on_device: OnDevice) -> None:
    """With equal scores and one-hot values the output is the mask itself."""
    s, n = 150, 2
    mask = DropoutMask(0.3, (99,), first_row=7)
    qkv = torch.zeros(s, 1, n, 3, s)
    qkv[:, 0, :, 2] = torch.eye(s).unsqueeze(1)
    weights = on_device("attention", device)(qkv, mask).view(s, n, s).transpose(0, 1)
    seen = torch.ones(s, s).tril()
    keep = mask.keep(n * s, s, qkv.device).view(n, s, s)
    expected = keep * seen / seen.sum(dim=1, keepdim=True) / 0.7
    torch.testing.assert_close(weights, expected)
    assert (keep.double().mean() - 0.7).abs() < 0.01


@pytest.mark.parametrize("device", DTYPES)
def test_dropout_drops_the_elements_of_its_mask(device: str, on_device: OnDevice) -> None:
    """Forward and backward, alone and with bias and residual; the mask is the reference's, at the right rate."""
    mask = DropoutMask(0.3, (3, 1 << 62 | 4), first_row=7)
    bits = implementation("dropout_bits", REFERENCE)(mask.keys, 7, 8, 260, torch.device("cpu"))
    assert torch.equal(on_device("dropout_bits", device)(mask.keys, 7, 8, 260, torch.device("cpu")), bits)
    factors = (((bits.int() & 0xFFFF) >= mask.threshold) / 0.7).transpose(0, 1)
    assert (mask.keep(100, 260, bits.device).double().mean() - 0.7).abs() < 0.01
    ones = torch.ones(8, 2, 260, requires_grad=True)
    kept = on_device("dropout", device)(ones, mask)
    kept.sum().backward()
    torch.testing.assert_close(kept, factors)
    torch.testing.assert_close(ones.grad, factors)
    added = on_device("bias_dropout_add", device)(ones, torch.ones(260), torch.zeros(8, 2, 260), mask)
    torch.testing.assert_close(added, 2 * factors)


@pytest.mark.parametrize("device", DTYPES)
def test_a_query_that_sees_no_key_gives_zero(device: str, on_device: OnDevice) -> None:
    visible = torch.ones(1, 5, 5, dtype=torch.bool)
    visible[0, 2] = False
    qkv = torch.randn(5, 1, 2, 3, 4, requires_grad=True)
    context = on_device("attention", device)(qkv, DropoutMask(0.1, (1,)), visible)
    context.sum().backward()
    assert (context[2] == 0).all()
    assert qkv.grad is not None
    assert qkv.grad.isfinite().all()


@pytest.mark.parametrize("device", DTYPES)
def test_what_is_not_a_number_stays_so(device: str, on_device: OnDevice) -> None:
    """A loss that is not a number must be seen, whichever loop it went through."""
    qkv = torch.randn(20, 1, 1, 3, 4)
    qkv[3, 0, 0, 1, 0] = torch.nan
    assert on_device("attention", device)(qkv, DropoutMask(0.0, (1,)))[3:].isnan().any(dim=-1).all()
    hidden, weight = torch.randn(4, 8), torch.randn(40, 8)
    hidden[1, 2] = torch.nan
    loss = on_device("linear_cross_entropy", device)(hidden, weight, torch.zeros(4, dtype=torch.int64), 40, Axis())
    assert loss.isnan()
