"""A step as a GPU takes it, on CPU tensors with interpreted kernels: a processor's losses, and its
update."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from benchmarks.kernels import KernelShape
from mlm_repro.engine.config import ModelConfig, ParallelConfig, TrainConfig
from mlm_repro.engine.kernels import registry
from mlm_repro.engine.kernels.adam import AdamStep, adamw
from mlm_repro.engine.kernels.dropout import normed_sum
from mlm_repro.engine.kernels.products import add_product
from mlm_repro.engine.model.microbatch import PipelineInput
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.engine.rng import Dropout
from mlm_repro.engine.step import TrainingStep, build_step
from mlm_repro.experiments.benchmark import Case
from tests.engine.exactness import OF_STEP, check_kernels
from tests.engine.recorded_graph import RecordedGraph, record_graphs
from tests.engine.triton_interpreter import add_in_fp32, interpret, step_as_on_gpu

MODEL = ModelConfig(
    num_layers=1, hidden_size=32, num_heads=1, seq_length=6, vocab_size=60, padded_vocab_size=64
)
TRAIN = TrainConfig(
    iterations=3,
    global_batch_size=2,
    microbatch_size=1,
    learning_rate=1e-2,
    warmup_iterations=0,
    precision="bf16",
    clip_gradient=0.5,
)


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    with monkeypatch.context() as patch:
        step_as_on_gpu(patch)
        yield patch
    registry.implementation.cache_clear()


def microbatches(iteration: int, dropout: float = 0.1) -> list[PipelineInput]:
    rows = torch.randint(60, (2, 7), generator=torch.Generator().manual_seed(iteration))
    return [
        PipelineInput(
            part[:, :-1], part[:, 1:], Dropout(dropout, 7, iteration, (place,)), places=(place,)
        )
        for place, part in zip(range(2), rows.split(1), strict=True)
    ]


def built(train: TrainConfig = TRAIN) -> TrainingStep:
    return build_step(MODEL, train, ParallelConfig(), serial_mesh())[1]


def losses(training: TrainingStep) -> list[tuple[float, float]]:
    """Loss and norm of the gradient of two iterations."""
    steps = [training.run(microbatches(iteration), 1e-2) for iteration in range(2)]
    return [(step.loss, step.norm) for step in steps]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_gpus_step_has_the_losses_of_a_processors(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = TRAIN.model_copy(update={"precision": precision})
    own = losses(built(train))
    with monkeypatch.context() as patch:
        step_as_on_gpu(patch)
        there = losses(built(train))
    registry.implementation.cache_clear()
    allowed = {"rel": 2e-2} if precision == "bf16" else {"rel": 1e-5}
    for ours, theirs in zip(own, there, strict=True):
        assert ours == pytest.approx(theirs, **allowed)


def test_a_gradient_that_is_still_to_be_divided_is_divided_once(
    as_on_gpu: pytest.MonkeyPatch,
) -> None:
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
def test_products_are_added_without_being_rounded(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_in_fp32(monkeypatch)
    torch.manual_seed(0)
    parts = [(torch.randn(5, 64).to(dtype), torch.randn(64, 7).to(dtype)) for _ in range(3)]
    total = torch.full((5, 7), torch.nan)
    for number, (a, b) in enumerate(parts):
        add_product(total, a, b, number > 0)
    exact = sum(a.double() @ b.double() for a, b in parts)
    assert (total - exact).abs().max() < 1e-4  # a rounded product is off by 0.1


@pytest.mark.parametrize("steps", [1, 3, 20_000])
@pytest.mark.parametrize("clipping", [1.0, 0.37 / 8192, 2.0**-16])
def test_an_update_that_clips_and_copies_by_itself_is_as_exact_as_one_that_clips_before(
    clipping: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside float64, on gradients as large as their factor is small; the last program is not
    full."""
    interpret(monkeypatch)
    torch.manual_seed(0)
    count = 2500
    numbers = [
        torch.randn(count),
        torch.randn(count) / clipping,
        torch.randn(count) * 0.1,
        torch.rand(count) * 0.01,
    ]
    for each in numbers[1:]:
        each[:100] = 0.0  # as in a row of the embedding that no token has had
    ours, step = (
        registry.implementation("adamw", "cuda"),
        AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, clipping, steps),
    )

    def updated(update: Callable[..., None], dtype: torch.dtype) -> list[torch.Tensor]:
        weights, gradient, m, v = (each.to(dtype, copy=True) for each in numbers)
        update(weights, copy := weights.bfloat16(), gradient, m, v, step)
        assert torch.equal(copy, weights.bfloat16())
        return [weights, m, v]

    exact, before = updated(adamw, torch.float64), updated(adamw, torch.float32)
    for true, other, fused in zip(exact, before, updated(ours, torch.float32), strict=True):
        unit = torch.finfo(torch.float32).eps * true.square().mean().sqrt()
        assert (fused - true).abs().max() <= 2 * ((other - true).abs().max() + unit / 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_update_does_not_depend_on_a_weights_place_and_needs_no_copy(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that ZeRO's parts have the bits of the whole; in fp16 as `fp16-pure` has it, rounded
    once."""
    interpret(monkeypatch)
    torch.manual_seed(0)
    ours, step = (
        registry.implementation("adamw", "cuda"),
        AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, 0.5, 3),
    )
    whole = [
        each.to(dtype)
        for each in (torch.randn(2500), torch.randn(2500), torch.randn(2500), torch.rand(2500))
    ]
    wide, parts = ([each.to(kind, copy=True) for each in whole] for kind in (torch.float32, dtype))
    for each in (whole, wide, [part[:1111] for part in parts], [part[1111:] for part in parts]):
        weights, gradient, m, v = each
        ours(weights, None, gradient, m, v, step)
    for all_at_once, in_two, in_fp32 in zip(whole, parts, wide, strict=True):
        assert torch.equal(all_at_once, in_two)
        assert torch.equal(all_at_once, in_fp32.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("b", "n", "d"), [(2, 5, 40), (1, 1, 96)])
def test_a_norm_with_what_is_added_is_as_exact_as_its_reference(
    b: int, n: int, d: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients beside float64, at the gradients of a real step; rows that fill no
    program."""
    interpret(monkeypatch)
    (case,) = check_kernels(dtype, KernelShape(s=19, b=b, n=n, d=d, v=1), ("add_norm",))
    assert isinstance(case, Case)
    assert case.ratios[0].is_reached


@pytest.mark.parametrize("adds", [False, True])
def test_a_norm_without_dropout_or_without_a_branch_is_its_reference(
    adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpret(monkeypatch)
    torch.manual_seed(0)
    leaves = [
        each.requires_grad_()
        for each in (torch.randn(9, 2, 40) + 1, torch.randn(40), torch.randn(40))
    ]
    more = (
        [torch.randn(9, 2, 40).requires_grad_(), torch.randn(40).requires_grad_()] if adds else []
    )
    results = []
    for device in (registry.REFERENCE, "cuda"):
        outputs = registry.implementation("add_norm", device)(
            *leaves, *(more or [None, None]), None, 1e-5
        )
        slopes = torch.autograd.grad(
            outputs, [*leaves, *more], [torch.ones(9, 2, 40), outputs[0].detach()]
        )
        results.append([*outputs, *slopes])
    for reference, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("d", "capability"), [(64, 90), (80, 90), (96, 90), (128, 90), (80, 80), (96, 80)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_heads_of_one_part_and_of_two_are_as_exact_as_the_reference(
    dtype: torch.dtype, d: int, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, at the gradients of a real step; queries and keys that fill no tile. Before
    Hopper heads of 80 and 96 are padded to one part."""
    interpret(monkeypatch)
    from mlm_repro.engine.kernels.gpu import attention

    monkeypatch.setattr(attention, "compute_capability", lambda: capability)
    (case,) = check_kernels(dtype, KernelShape(s=70, b=1, n=1, d=d), ("attention",))
    assert isinstance(case, Case)
    assert case.ratios[0].is_reached


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(("attention", KernelShape(b=1, n=1, d=d, v=1)) for d in (64, 80, 96, 128)),
        ("bias_gelu", KernelShape(n=1, d=16, v=1)),
        ("bias_dropout_add", KernelShape(n=1, d=16, v=1)),
        ("add_norm", KernelShape(s=8, v=1)),
    ],
)
def test_a_kernel_is_as_exact_at_the_size_of_a_real_step(
    name: str, shape: KernelShape, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its gradients, 1,024 positions, and sums of a bias over 8,192 tokens; a norm, whose rows
    alone are long, at the width of 2.5b. Larger tiles, for the interpreter, add up more in each
    sum."""
    interpret(monkeypatch)
    from mlm_repro.engine.kernels.gpu import attention, bias_dropout_add, bias_gelu

    tiles = (attention.Tiles(256, 256),) * 3
    monkeypatch.setattr(attention, "tiles_for", lambda *_: tiles)
    for module in (bias_dropout_add, bias_gelu):
        monkeypatch.setattr(module, "ROWS", 256)
    (case,) = check_kernels(dtype, shape, (name,), (OF_STEP,))
    assert isinstance(case, Case)
    assert case.ratios[0].is_reached


def test_a_norm_that_a_hook_watches_is_called() -> None:
    """So that a recorder sees it; also where rows are wider than a program holds."""
    norm, x = torch.nn.LayerNorm(8), torch.randn(3, 1, 8)
    seen: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        step_as_on_gpu(patch)
        _, fused = normed_sum(norm, x)
        norm.register_forward_hook(lambda module, given, output: seen.append(output))
        _, watched = normed_sum(norm, x)
        patch.setattr("mlm_repro.engine.kernels.gpu.bias_dropout_add.WIDEST", 4)
        norm._forward_hooks.clear()
        _, wide = normed_sum(norm, x)
    registry.implementation.cache_clear()
    assert len(seen) == 1
    assert torch.equal(seen[0], watched)
    assert torch.equal(wide, watched)
    torch.testing.assert_close(fused, watched)


class Halved(torch.nn.LayerNorm):
    """A norm with the parameters of LayerNorm and other values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


@pytest.mark.parametrize("norm", [torch.nn.RMSNorm(8), Halved(8)], ids=["without bias", "subclass"])
def test_a_norm_that_the_kernel_does_not_compute_is_called(
    norm: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_as_on_gpu(monkeypatch)
    x, branch, bias = torch.randn(3, 1, 8), torch.randn(3, 1, 8), torch.randn(8)
    added, normed = normed_sum(norm, x, branch, bias)
    registry.implementation.cache_clear()
    torch.testing.assert_close(added, x + branch + bias)
    torch.testing.assert_close(normed, norm(added))


def test_captured_microbatches_have_the_bits_of_others(as_on_gpu: pytest.MonkeyPatch) -> None:
    """Also after weights were loaded; another shape is computed as before."""
    record_graphs(as_on_gpu)
    eager, captured = built(), built()
    expected = losses(eager)
    eager.gradient(microbatches(5))  # learns the sites of dropout
    captured.capture(microbatches(5))
    graphs = captured.model.graphs
    assert graphs is not None
    first, later = (graph for graph, _ in graphs.graphs)
    before = first.replays
    assert losses(captured) == expected
    assert first.replays - before == 2 == later.replays - before
    for ours, theirs in zip(captured.optimizer.groups, eager.optimizer.groups, strict=True):
        assert torch.equal(ours.master, theirs.master)
        ours.flat.mul_(0.5)
        theirs.flat.mul_(0.5)
    assert captured.gradient(microbatches(6)) == eager.gradient(microbatches(6))
    longer = [
        replace(each, tokens=each.tokens[:, :4], targets=each.targets[:, :4])
        for each in microbatches(7)
    ]
    before = first.replays
    assert captured.gradient(longer) == eager.gradient(longer)
    assert first.replays == before


@pytest.mark.parametrize("fault", ["keys", "numbers"])
def test_what_cannot_be_captured_is_computed_as_before(
    fault: str, as_on_gpu: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record_graphs(as_on_gpu)
    training = built()
    if fault == "keys":  # each mask has its own, which the host makes
        as_on_gpu.setattr(Dropout, "on_device", lambda self, device, rows: self)
    else:
        as_on_gpu.setattr(RecordedGraph, "replay", lambda self: None)
    training.capture(microbatches(0))
    assert training.model.graphs is None
    said = {"keys": "lift_fresh", "numbers": r"\[[\d., ]+\], without them \["}[fault]
    assert re.search(
        f"CUDA graphs are not used, so that steps take longer: .*{said}", capsys.readouterr().err
    )
