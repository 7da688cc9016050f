"""Fused kernels differ from the reference in float64 as rounding allows, and drop what it drops."""

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import numba
import numpy as np
import pytest
import torch

from mlm_repro.engine.compiled import FLOAT_RULES, Array, exponential
from mlm_repro.engine.kernels import attention, cross_entropy
from mlm_repro.engine.kernels.adam import AdamStep, adam_direction, adamw
from mlm_repro.engine.kernels.registry import DTYPES, KERNELS, REFERENCE, implementation, kernel
from mlm_repro.engine.parallel.mesh import LoneAxis
from mlm_repro.engine.rng import DropoutMask
from tests.engine.rounding import FAR, MODELS, Rounding, deviations, is_rounding
from tests.engine.triton_interpreter import interpret

OnDevice = Callable[[str, str], Callable[..., torch.Tensor]]
"""(name, device) → what computes it there."""
Inputs = tuple[list[torch.Tensor], tuple[Any, ...]]
"""Tensors with a gradient, and other arguments."""
Results = Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Of each output and gradient: a kernel's, the exact one, and draws of the exact one with rounding
errors."""


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64) * scale


def attention_inputs(s: int, b: int, n: int, d: int, probability: float) -> Inputs:
    mask = (
        DropoutMask(probability, tuple(range(5, 5 + b)), first_row=3 * s) if probability else None
    )
    return [random(s, b, n, 3, d)], (mask,)


def cross_entropy_inputs(n: int, h: int, v: int, vocab_size: int) -> Inputs:
    return [random(n, h), random(v, h, scale=0.3)], (
        torch.randint(0, vocab_size, (n,)),
        vocab_size,
        LoneAxis(),
    )


def softmax_inputs(b: int, n: int, s: int, k: int, is_causal: bool) -> Inputs:
    visible = torch.rand(b, 1, s, k) < 0.6
    visible[..., 0] = True
    return [random(b, n, s, k, scale=3.0)], (0.3, None if is_causal else visible)


def bias_gelu_inputs(*shape: int) -> Inputs:
    return [
        random(*shape, scale=4.0).clamp(-6.0, 6.0),
        random(shape[-1]),
    ], ()  # below −9.6 kernels take e⁸⁰


def cases() -> Iterator[Any]:
    """Kernel, and inputs of odd shapes."""
    for shape in ((1, 1, 1, 4), (37, 2, 3, 8), (130, 1, 2, 8)):
        for probability in (0.0, 0.1):
            name = f"attention-{'x'.join(map(str, shape))}-{probability}"
            yield pytest.param(
                "attention", lambda a=(*shape, probability): attention_inputs(*a), id=name
            )
    for shape in ((1, 1, 1, 1), (2, 3, 5, 9), (1, 2, 3, 130)):
        for is_causal in (True, False):
            name = (
                f"masked_softmax-{'x'.join(map(str, shape))}-{'causal' if is_causal else 'masked'}"
            )
            yield pytest.param(
                "masked_softmax", lambda a=(*shape, is_causal): softmax_inputs(*a), id=name
            )
    for sizes in ((1, 3, 5, 5), (37, 24, 96, 91), (50, 7, 33, 20)):
        name = f"linear_cross_entropy-{'x'.join(map(str, sizes))}"
        yield pytest.param(
            "linear_cross_entropy", lambda a=sizes: cross_entropy_inputs(*a), id=name
        )
    for shape in ((1, 1, 1), (5, 2, 37), (3, 1, 300)):  # s, b, h
        name = "x".join(map(str, shape))
        mask = DropoutMask(0.1, tuple(range(shape[1])), first_row=4)
        yield pytest.param(
            "dropout", lambda a=shape, m=mask: ([random(*a)], (m,)), id=f"dropout-{name}"
        )
        yield pytest.param(
            "bias_gelu", lambda a=shape: bias_gelu_inputs(*a), id=f"bias_gelu-{name}"
        )
        for dropping in (None, mask):
            yield pytest.param(
                "bias_dropout_add",
                lambda a=shape, m=dropping: ([random(*a), random(a[-1]), random(*a)], (m,)),
                id=f"bias_dropout_add-{name}-{'masked' if dropping else 'whole'}",
            )


def run(
    function: Callable[..., torch.Tensor],
    tensors: list[torch.Tensor],
    others: tuple[Any, ...],
    dtype: torch.dtype,
    upstream: torch.Tensor,
) -> list[torch.Tensor]:
    """Output and gradients; inputs and the output's gradient are not contiguous."""
    leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in tensors]
    output = function(*(_spread(leaf) for leaf in leaves), *others)
    output.backward(_spread(upstream.to(output.dtype)))
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same values at every second place of memory."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> OnDevice:
    """A device's implementation of a kernel; a GPU's under Triton's interpreter."""
    interpret_once = cache(partial(interpret, monkeypatch))

    def found(name: str, device: str) -> Callable[..., torch.Tensor]:
        if device == "cuda":
            interpret_once()
        return implementation(name, device)

    return found


def cases_of_devices() -> Iterator[Any]:
    """Each case on every device that has an implementation of its own, in its number formats."""
    for case in cases():
        for device in (each for each in DTYPES if each in KERNELS[case.values[0]]):
            for dtype in DTYPES[device]:
                yield pytest.param(
                    *case.values,
                    device,
                    dtype,
                    id=f"{case.id}-{device}-{dtype}".replace("torch.", ""),
                )


def results(
    name: str,
    device: str,
    dtype: torch.dtype,
    inputs: Inputs,
    upstream: Callable[..., torch.Tensor],
    on_device: OnDevice,
) -> Results:
    """Of a kernel on its inputs; `upstream` makes the gradient of its output from a shape."""
    tensors, others = [tensor.to(dtype).double() for tensor in inputs[0]], inputs[1]
    reference, model = implementation(name, REFERENCE), MODELS[name]
    given = upstream(*reference(*tensors, *others).shape).bfloat16().double()
    exact = [each[0] for each in model(Rounding(torch.float64), tensors, others, given)]
    for formula, true in zip(
        exact, run(reference, tensors, others, torch.float64, given), strict=True
    ):
        torch.testing.assert_close(formula, true, rtol=1e-9, atol=1e-12)
    drawn = model(Rounding(dtype), tensors, others, given)
    return zip(
        run(on_device(name, device), tensors, others, dtype, given), exact, drawn, strict=True
    )


@pytest.mark.parametrize(("name", "inputs", "device", "dtype"), list(cases_of_devices()))
def test_a_kernel_is_as_exact_as_rounding_allows(
    name: str,
    inputs: Callable[[], Inputs],
    device: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    on_device: OnDevice,
) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 4000)
    monkeypatch.setattr(attention, "QUERY_BYTES", 128)
    monkeypatch.setattr(attention, "WORKSPACE_BYTES", 1 << 17)
    torch.manual_seed(0)
    for found, exact, draws in results(name, device, dtype, inputs(), random, on_device):
        assert found.shape == exact.shape
        assert found.dtype == (dtype if found.dim() else torch.float32)
        assert deviations(found, exact, draws).max() < FAR


def near_one(*shape: int) -> torch.Tensor:
    return 0.75 + torch.rand(shape, dtype=torch.float64) / 2


def sign(*shape: int) -> torch.Tensor:
    return torch.randint(2, shape).double() * 2 - 1


def apart(*shape: int) -> torch.Tensor:
    """About one quarter or seven quarters: far from their mean."""
    return (1 + 0.75 * sign(*shape)) * near_one(*shape)


def attention_sharp(mask: DropoutMask | None) -> Inputs:
    query, key, value = near_one(3, 8, 4, 2, 4)
    which = sign(8, 4, 2, 1)
    qkv = torch.stack([query / 4, key / 4 * which, value * (1 + 0.75 * which)], dim=3)
    return [qkv], (mask,)


SHARP: dict[str, Callable[[int], Inputs]] = {
    "attention": lambda row: attention_sharp(DropoutMask(0.2, (1, 2, 3, 4), row)),
    "linear_cross_entropy": lambda _: (
        [near_one(8, 4) / 4, near_one(8, 4) * sign(8, 4)],
        (torch.randint(0, 7, (8,)), 7, LoneAxis()),
    ),
    "dropout": lambda row: ([near_one(2, 2, 130)], (DropoutMask(0.2, (1, 2), row),)),
    "bias_gelu": lambda _: ([near_one(2, 2, 130), near_one(130)], ()),
    "bias_dropout_add": lambda row: (
        [near_one(2, 2, 130), near_one(130), near_one(2, 2, 130)],
        (DropoutMask(0.2, (1, 2), row),),
    ),
    "masked_softmax": lambda _: (
        [near_one(1, 1, 4, 4)],
        (0.25, torch.ones(1, 1, 4, 4, dtype=torch.bool)),
    ),
}
"""Inputs whose sums have few terms and cancel little, so that errors are about as small as the last
place.

fp32 holds the factors exactly, whose errors all elements would share.
"""


UNSEEN = {
    ("linear_cross_entropy", torch.bfloat16, 0),  # the loss, in fp32 from logits in bf16
    ("masked_softmax", torch.float32, 1),  # gradients that are small differences of larger numbers
}
"""Kernel, dtype, place among output and gradients: rounding alone makes about four units in the
last place."""


def planted(found: torch.Tensor) -> torch.Tensor:
    """With four units in the last place more in one element in a hundred of those that are not
    zero."""
    wrong = found.clone()
    bits = wrong.view(torch.int32 if wrong.dtype == torch.float32 else torch.int16).view(-1)
    bits[wrong.view(-1).nonzero()[::100]] += 4
    return wrong


def assert_rounding_alone(results_of: Callable[[int], Results], unseen: Iterable[int] = ()) -> None:
    """A hundred seeds are as exact as rounding allows, and not so with an error planted in any
    output but some."""
    by_seed = []
    for seed in range(100):
        torch.manual_seed(seed)
        by_seed.append(
            [
                (
                    deviations(found, exact, draws).flatten(),
                    deviations(planted(found), exact, draws).flatten(),
                )
                for found, exact, draws in results_of(seed)
            ]
        )
    for place, errors in enumerate(zip(*by_seed, strict=True)):
        right, wrong = (torch.cat(each) for each in zip(*errors, strict=True))
        assert is_rounding(right)
        assert place in unseen or not is_rounding(wrong)


def sharp_cases() -> Iterator[Any]:
    """Each kernel on the CPU, or, where it has none there, under the interpreter, which is slow."""
    for name in SHARP:
        device = "cpu" if "cpu" in KERNELS[name] else "cuda"
        for dtype in DTYPES["cpu"] if device == "cpu" else (torch.float32,):
            yield pytest.param(
                name, device, dtype, id=f"{name}-{device}-{dtype}".replace("torch.", "")
            )


@pytest.mark.parametrize(("name", "device", "dtype"), list(sharp_cases()))
def test_a_hundred_seeds_pass_and_four_units_in_the_last_place_do_not(
    name: str, device: str, dtype: torch.dtype, on_device: OnDevice
) -> None:
    assert_rounding_alone(
        lambda seed: results(name, device, dtype, SHARP[name](seed), apart, on_device),
        [place for place in range(5) if (name, dtype, place) in UNSEEN],
    )


def test_every_kernel_is_held_against_its_reference() -> None:
    assert (
        {case.values[0] for case in cases()}
        == SHARP.keys()
        == MODELS.keys()
        == KERNELS.keys() - {"dropout_bits", "add_norm", "adamw"}
    )


@pytest.mark.parametrize("update", [adamw, adam_direction])
def test_an_update_does_not_depend_on_an_elements_place(update: Callable[..., Any]) -> None:
    whole = torch.randn(4, 1003).abs()
    parts = [whole[:, :301].clone(), whole[:, 301:].clone()]
    results = []
    for weights, gradient, *moments in (whole, *parts):
        step = AdamStep(1e-2, 0.9, 0.999, 1e-8, 0.1, 0.3, 2)
        more: tuple[Any, ...] = (gradient, *moments, step)
        if update is adamw:
            adamw(weights, None, *more)
            results.append(torch.stack([weights, *moments]))
        else:
            results.append(update(weights, *more, True))
    assert torch.equal(results[0], torch.cat(results[1:], -1))


@numba.njit(fastmath=FLOAT_RULES, error_model="numpy")
def exponentials(numbers: Array, found: Array) -> None:
    for i in range(numbers.size):
        found[i] = exponential(numbers[i])


def test_exponentials_are_exact_to_two_units_in_the_last_place() -> None:
    """Also as part of a loop that may add up in any order, and without fused multiplication and
    addition."""
    numbers = np.linspace(-87, 88, 500_001, dtype=np.float32)
    found = np.empty_like(numbers)
    exponentials(numbers, found)
    exact = np.exp(numbers.astype(np.float64))
    assert np.abs((found - exact) / np.spacing(exact.astype(np.float32))).max() <= 2


def test_what_a_device_has_no_kernel_for_goes_to_the_reference() -> None:
    assert kernel("attention", torch.empty(0, dtype=torch.float64)) is attention.reference
    assert kernel("attention", torch.empty(0, device="meta")) is attention.reference
    assert kernel("attention", torch.empty(0)) is attention.blocked
    with pytest.raises(KeyError):
        kernel("no such kernel", torch.empty(0))


@pytest.mark.parametrize("device", DTYPES)
def test_dropout_drops_the_elements_of_its_mask(device: str, on_device: OnDevice) -> None:
    """Forward and backward, alone and with bias and residual; the mask is the reference's, at the
    right rate."""
    mask = DropoutMask(0.3, (3, 1 << 62 | 4), first_row=7)
    bits = implementation("dropout_bits", REFERENCE)(mask.keys, 7, 8, 260, torch.device("cpu"))
    assert torch.equal(
        implementation("dropout_bits", "cpu")(mask.keys, 7, 8, 260, torch.device("cpu")), bits
    )
    factors = (((bits.int() & 0xFFFF) >= mask.threshold) / 0.7).transpose(0, 1)
    assert (mask.keep(100, 260, bits.device).double().mean() - 0.7).abs() < 0.01
    ones = torch.ones(8, 2, 260, requires_grad=True)
    kept = on_device("dropout", device)(ones, mask)
    kept.sum().backward()
    torch.testing.assert_close(kept, factors)
    torch.testing.assert_close(ones.grad, factors)
    added = on_device("bias_dropout_add", device)(
        ones, torch.ones(260), torch.zeros(8, 2, 260), mask
    )
    torch.testing.assert_close(added, 2 * factors)


@pytest.mark.parametrize("device", DTYPES)
def test_what_is_not_a_number_stays_so(device: str, on_device: OnDevice) -> None:
    """A loss that is not a number must be seen, whichever loop it went through."""
    qkv = torch.randn(20, 1, 1, 3, 4)
    qkv[3, 0, 0, 1, 0] = torch.nan
    assert on_device("attention", device)(qkv, DropoutMask(0.0, (1,)))[3:].isnan().any(dim=-1).all()
    hidden, weight = torch.randn(4, 8), torch.randn(40, 8)
    hidden[1, 2] = torch.nan
    loss = on_device("linear_cross_entropy", device)(
        hidden, weight, torch.zeros(4, dtype=torch.int64), 40, LoneAxis()
    )
    assert loss.isnan()


def test_attention_is_the_same_with_the_tiles_of_an_older_gpu(
    on_device: OnDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash = on_device("attention", "cuda")
    from mlm_repro.engine.kernels.gpu import attention as gpu_attention

    tensors, others = attention_inputs(150, 1, 1, 96, 0.1)
    upstream, results = random(150, 1, 96), {}
    for capability in (80, 90):
        monkeypatch.setattr(gpu_attention, "compute_capability", lambda own=capability: own)
        tiles = gpu_attention.tiles_for(96, torch.bfloat16)
        results[tiles] = run(flash, tensors, others, torch.bfloat16, upstream)
    (older, newer), exact = (
        results.values(),
        run(attention.reference, tensors, others, torch.float64, upstream),
    )
    for one, other, true in zip(older, newer, exact, strict=True):
        assert (one - true).abs().max() < 0.03 * true.abs().max()
        assert (one - other).abs().max() < 0.03 * true.abs().max()
