"""A step as a GPU takes it, on CPU tensors with interpreted kernels: a processor's losses, and its update."""

from collections.abc import Iterator

import pytest
import torch

from benchmarks.kernels import FACTORS, KernelShape, check_kernels
from mlm_repro.engine.config import ModelConfig, ParallelConfig, TrainConfig
from mlm_repro.engine.kernels import registry
from mlm_repro.engine.kernels.adam import AdamStep, adamw
from mlm_repro.engine.kernels.products import add_product
from mlm_repro.engine.model.microbatch import PipelineInput
from mlm_repro.engine.model.transformer import add_norm
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.engine.rng import Dropout, DropoutMask
from mlm_repro.engine.step import TrainingStep, build_step
from mlm_repro.experiments.benchmark import Case
from tests.engine.triton_interpreter import interpret, step_as_on_gpu

MODEL = ModelConfig(num_layers=1, hidden_size=48, num_heads=2, seq_length=12, vocab_size=60, padded_vocab_size=64)
TRAIN = TrainConfig(
    iterations=3, global_batch_size=4, microbatch_size=2, learning_rate=1e-2, warmup_iterations=0, precision="bf16",
    clip_gradient=0.5,
)  # fmt: skip


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    with monkeypatch.context() as patch:
        step_as_on_gpu(patch)
        yield patch
    registry.implementation.cache_clear()


def microbatches(iteration: int, dropout: float = 0.1) -> list[PipelineInput]:
    rows = torch.randint(60, (4, 13), generator=torch.Generator().manual_seed(iteration))
    return [
        PipelineInput(part[:, :-1], part[:, 1:], Dropout(dropout, 7, iteration, (place, place + 1)), places=(place,))
        for place, part in zip(range(0, 4, 2), rows.split(2), strict=True)
    ]


def built(train: TrainConfig = TRAIN) -> TrainingStep:
    return build_step(MODEL, train, ParallelConfig(), serial_mesh())[1]


def losses(training: TrainingStep) -> list[tuple[float, float]]:
    """Loss and norm of the gradient of two iterations."""
    steps = [training.run(microbatches(iteration), 1e-2) for iteration in range(2)]
    return [(step.loss, step.norm) for step in steps]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_gpus_step_has_the_losses_of_a_processors(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    train = TRAIN.model_copy(update={"precision": precision})
    own = losses(built(train))
    with monkeypatch.context() as patch:
        step_as_on_gpu(patch)
        there = losses(built(train))
    registry.implementation.cache_clear()
    allowed = {"rel": 2e-2} if precision == "bf16" else {"rel": 1e-5}
    for ours, theirs in zip(own, there, strict=True):
        assert ours == pytest.approx(theirs, **allowed)


def test_a_gradient_that_is_still_to_be_divided_is_divided_once(as_on_gpu: pytest.MonkeyPatch) -> None:
    training = built()
    norm = training.gradient(microbatches(0)).norm
    (group, *_) = training.optimizer.groups
    assert group.divisor == 2
    raw = group.main_gradient.clone()
    for _ in range(2):
        assert torch.equal(group.own_gradient, raw / 2)
    training.optimizer.groups[1].own_gradient  # noqa: B018
    assert training.optimizer.gradient_norm().item() == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_added_without_being_rounded(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parts = [(torch.randn(5, 64).to(dtype), torch.randn(64, 7).to(dtype)) for _ in range(3)]
    total = torch.full((5, 7), torch.nan)
    for number, (a, b) in enumerate(parts):
        add_product(total, a, b, number > 0)
    exact = sum(a.double() @ b.double() for a, b in parts)
    assert (total - exact).abs().max() < 1e-4  # a rounded product is off by 0.1


@pytest.mark.parametrize("copied", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("clipping", [1.0, 0.37 / 8192, 2.0**-16])
def test_an_update_in_one_pass_is_as_exact_as_torchs(
    copied: torch.dtype | None, clipping: float, as_on_gpu: pytest.MonkeyPatch
) -> None:
    """Beside float64, on gradients as large as their factor is small; the third update."""
    torch.manual_seed(0)
    count = 2500
    numbers = [torch.randn(count), torch.randn(count) / clipping, torch.randn(count) * 0.1, torch.rand(count) * 0.01]
    step = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, clipping, 3)

    def updated(function: object, wide: bool = False) -> list[torch.Tensor]:
        weights, gradient, m, v = (each.double() if wide else each.clone() for each in numbers)
        copy = torch.empty(count, dtype=copied) if copied and not wide else None
        assert callable(function)
        function(weights, copy, gradient, m, v, step)
        assert copy is None or torch.equal(copy, weights.to(copy.dtype))
        return [weights, m, v]

    exact, theirs = updated(adamw, wide=True), updated(adamw)
    ours = updated(registry.implementation("adamw", "cuda"))
    for true, torchs, fused in zip(exact, theirs, ours, strict=True):
        unit = torch.finfo(torch.float32).eps * true.square().mean().sqrt()
        assert (fused - true).abs().max() <= 2 * ((torchs - true).abs().max() + unit / 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [40, 200])
@pytest.mark.parametrize("kind", ["alone", "without dropout", "whole"])
def test_a_norm_with_what_is_added_is_as_exact_as_its_reference(
    kind: str, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients beside float64, at the gradients of a real step; rows that fill no program."""
    interpret(monkeypatch)
    torch.manual_seed(0)
    mask = DropoutMask(0.1, (3, 4), first_row=5) if kind == "whole" else None
    numbers = [torch.randn(19, 2, width) + 1, 1 + 0.2 * torch.randn(width), torch.randn(width)]
    numbers += [] if kind == "alone" else [torch.randn(19, 2, width), torch.randn(width)]
    tensors = [each.to(dtype) for each in numbers]
    for factor in FACTORS:
        upstream = [torch.empty(19, 2, width).uniform_(-factor, factor).bfloat16() for _ in range(2)]

        def results(device: str, kind: torch.dtype, given: list[torch.Tensor] = upstream) -> list[torch.Tensor]:
            leaves = [each.to(kind).requires_grad_() for each in tensors]
            more = leaves[3:] or [None, None]
            outputs = registry.implementation("add_norm", device)(*leaves[:3], *more, mask, 1e-5)
            slopes = torch.autograd.grad(outputs, leaves, [each.to(kind) for each in given])
            return [each.detach() for each in (*outputs, *slopes)]

        exact, theirs = results(registry.REFERENCE, torch.float64), results(registry.REFERENCE, dtype)
        for true, reference, fused in zip(exact, theirs, results("cuda", dtype), strict=True):
            unit = torch.finfo(dtype).eps * true.square().mean().sqrt()
            assert (fused - true).abs().max() <= 2 * ((reference - true).abs().max() + unit / 4)


@pytest.mark.parametrize("d", [64, 80, 96, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads_of_one_part_and_of_two_are_as_exact_as_the_reference(
    dtype: torch.dtype, d: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, at the gradients of a real step; queries and keys that fill no tile."""
    interpret(monkeypatch)
    (case,) = check_kernels(dtype, KernelShape(s=70, b=1, n=1, d=d), ("attention",))
    assert isinstance(case, Case)
    assert case.ratios[0].is_reached


def test_a_norm_that_a_hook_watches_is_called() -> None:
    """So that a recorder sees it; also where rows are wider than a program holds."""
    norm, x = torch.nn.LayerNorm(8), torch.randn(3, 1, 8)
    seen: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        step_as_on_gpu(patch)
        _, fused = add_norm(norm, x)
        norm.register_forward_hook(lambda module, given, output: seen.append(output))
        _, watched = add_norm(norm, x)
        patch.setattr("mlm_repro.engine.kernels.gpu.bias_dropout_add.WIDEST", 4)
        norm._forward_hooks.clear()
        _, wide = add_norm(norm, x)
    registry.implementation.cache_clear()
    assert len(seen) == 1
    assert torch.equal(seen[0], watched)
    assert torch.equal(wide, watched)
    torch.testing.assert_close(fused, watched)
