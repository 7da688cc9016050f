"""Cross-entropy over a divided vocabulary equals torch's over the real columns."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mlm_repro.engine.kernels import cross_entropy
from mlm_repro.engine.kernels.cross_entropy import vocab_parallel_cross_entropy
from mlm_repro.engine.kernels.registry import DTYPES, implementation
from mlm_repro.engine.launch.mesh import build_mesh
from mlm_repro.engine.launch.threads import run_threads
from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.engine.parallel.mesh import serial_mesh
from tests.engine.triton_interpreter import interpret

ROWS = 32


def inputs(vocab_size: int, spread: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, ROWS, dtype=torch.float64, generator=generator) * spread
    targets = torch.randint(0, vocab_size, (20,), generator=generator)
    targets[:2] = torch.tensor([0, vocab_size - 1])
    return logits, targets, torch.rand(20, dtype=torch.float64, generator=generator)


def torchs(vocab_size: int, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    logits, targets, weights = inputs(vocab_size, spread)
    logits.requires_grad_()
    losses = F.cross_entropy(logits[:, :vocab_size], targets, reduction="none")
    losses.backward(weights)
    assert logits.grad is not None
    return losses.detach(), logits.grad


def ours(layout: Layout, vocab_size: int, spread: float) -> tuple[Any, Any]:
    mesh = build_mesh(layout)
    logits, targets, weights = inputs(vocab_size, spread)
    mine = logits.chunk(layout.tp, dim=1)[mesh.tp.rank].clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(mine, targets, vocab_size, mesh.tp)
    losses.backward(weights)
    assert mine.grad is not None
    return losses.detach().numpy(), mesh.tp.all_gather(mine.grad, 1).numpy()


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize(("vocab_size", "spread"), [(32, 1.0), (29, 1.0), (10, 1.0), (29, 1e4)])
def test_losses_and_gradients_equal_torchs(tp: int, vocab_size: int, spread: float) -> None:
    """With 10 of 32 rows real and four ranks, two ranks hold nothing but padding."""
    losses, gradient = torchs(vocab_size, spread)
    for rank_losses, rank_gradient in run_threads(ours, tp, Layout(tp=tp), vocab_size, spread):
        torch.testing.assert_close(torch.from_numpy(rank_losses), losses, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            torch.from_numpy(rank_gradient), gradient, rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_have_fp32_losses(dtype: torch.dtype) -> None:
    logits, targets, _ = inputs(29, 3.0)
    half = logits.to(dtype).requires_grad_()
    losses = vocab_parallel_cross_entropy(half, targets, 29, serial_mesh().tp)
    assert losses.dtype == torch.float32
    expected = F.cross_entropy(half.detach().double()[:, :29], targets, reduction="none")
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    losses.sum().backward()
    assert half.grad is not None
    assert half.grad.dtype == dtype


def test_the_callers_logits_are_left_alone() -> None:
    logits, targets, _ = inputs(29, 1.0)
    kept = logits.clone()
    vocab_parallel_cross_entropy(
        logits.requires_grad_(), targets, 29, serial_mesh().tp
    ).sum().backward()
    assert torch.equal(logits, kept)


REAL = 20


def projected(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden [24, 16], ever further from 0, weight [32, 16], and targets, of which every second is
    the likeliest."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(24, 16, generator=generator),
        torch.randn(ROWS, 16, generator=generator),
    )
    hidden *= torch.logspace(-2, 1.5, 24).unsqueeze(1)
    targets = torch.randint(0, REAL, (24,), generator=generator)
    targets[::2] = (hidden @ weight[:REAL].t()).argmax(1)[::2]
    return hidden.to(dtype), weight.to(dtype), targets


def in_chunks_on_ranks(device: str, dtype: torch.dtype) -> list[Any]:
    axis = build_mesh(Layout(tp=4)).tp
    hidden, weight, targets = projected(dtype)
    hidden, mine = hidden.requires_grad_(), weight.chunk(4)[axis.rank].clone().requires_grad_()
    loss = implementation("linear_cross_entropy", device)(hidden, mine, targets, REAL, axis)
    loss.backward()
    assert hidden.grad is not None
    assert mine.grad is not None
    whole = (
        loss.detach().double(),
        axis.all_reduce(hidden.grad.double()),
        axis.all_gather(mine.grad.double(), 0),
    )
    return [tensor.numpy() for tensor in whole]


def on_one_rank(dtype: torch.dtype, work: torch.dtype) -> list[torch.Tensor]:
    hidden, weight, targets = projected(dtype)
    hidden, weight = hidden.to(work).requires_grad_(), weight.to(work).requires_grad_()
    loss = cross_entropy.reference(hidden, weight, targets, REAL, serial_mesh().tp)
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [tensor.double() for tensor in (loss.detach(), hidden.grad, weight.grad)]


@pytest.mark.parametrize(
    ("device", "dtype"), [(name, dtype) for name, dtypes in DTYPES.items() for dtype in dtypes]
)
def test_projection_and_loss_in_chunks_on_four_ranks_are_as_exact_as_the_reference_on_one(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third rank has padding too, the last nothing else; some rows have a largest logit far
    above other ranks'."""
    if device == "cuda":
        interpret(monkeypatch)
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 200)
    exact, reference = on_one_rank(dtype, torch.float64), on_one_rank(dtype, dtype)
    for found in run_threads(in_chunks_on_ranks, 4, device, dtype):
        for true, theirs, ours in zip(exact, reference, map(torch.from_numpy, found), strict=True):
            allowed = 2 * (theirs - true).abs().max() + torch.finfo(dtype).eps * true.abs().max()
            assert (ours - true).abs().max() <= allowed


WORDS, POSITIONS, STEP = 51_200, 64, 8_192
"""2.5b's padded vocabulary, positions here, and positions of the step whose factors are taken."""
LOSS_SCALE = 2.0**16


def scaled_gradients(device: str, dtype: torch.dtype, factor: float) -> list[torch.Tensor]:
    """Gradients of hidden states and weight, the loss times a factor."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(POSITIONS, 64, generator=generator).half().to(dtype).requires_grad_()
    weight = (0.02 * torch.randn(WORDS, 64, generator=generator)).half().to(dtype).requires_grad_()
    targets = torch.arange(POSITIONS)
    loss = implementation("linear_cross_entropy", device)(
        hidden, weight, targets, WORDS, serial_mesh().tp
    )
    (loss * factor).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [hidden.grad.double() / factor, weight.grad[POSITIONS:].double() / factor]


def errors_of(
    device: str, dtype: torch.dtype, exact: list[torch.Tensor], factor: float
) -> tuple[list[float], int]:
    """Errors of hidden states' gradient and of the rows of words that are no target, each as a norm
    and at its largest; zeros in these rows."""
    ours = scaled_gradients(device, dtype, factor)
    errors = [
        float(error)
        for own, true in zip(ours, exact, strict=True)
        for error in ((own - true).norm() / true.norm(), (own - true).abs().max())
    ]
    return errors, int((ours[1] == 0).sum())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("factor", [LOSS_SCALE, LOSS_SCALE * POSITIONS / STEP], ids=["own", "step"])
def test_small_probabilities_are_kept_with_the_loss_scale_and_the_positions_of_a_step(
    factor: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A word's probability is 2e-5: over 8,192 positions 2e-9, which fp16 holds only times the loss
    scale. The mean here is over 64; the factor makes it one over 8,192, exactly, being a power of
    two."""
    exact = scaled_gradients("reference", torch.float64, factor)
    allowed, zeros = errors_of("reference", dtype, exact, factor)
    interpret(monkeypatch)
    from mlm_repro.engine.kernels.gpu import cross_entropy as on_gpu

    monkeypatch.setattr(on_gpu, "ROW_BYTES", 1 << 17)
    monkeypatch.setattr(on_gpu, "CHUNK_BYTES", 1 << 24)
    errors, ours = errors_of("cuda", dtype, exact, factor)
    assert all(own <= 2 * theirs for own, theirs in zip(errors, allowed, strict=True)), (
        errors,
        allowed,
    )
    if dtype == torch.bfloat16:
        assert ours <= zeros
        return
    assert ours <= (exact[1].abs() * factor < 2.0**-23).sum(), "fp16 has numbers from 2⁻²⁴ on"
    monkeypatch.setattr(cross_entropy, "HALF_SCALE", 1 / STEP)
    assert errors_of("cuda", dtype, exact, factor)[0][2] > 100 * allowed[2]
