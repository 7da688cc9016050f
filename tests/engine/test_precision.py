"""Number formats: the loss scale's rule, fp32 master weights, and half-precision runs that
learn."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from torch import nn

from mlm_repro.engine.compare.recorder import whole_state
from mlm_repro.engine.config import Precision, TrainConfig
from mlm_repro.engine.optim.adam import FlatAdamW
from mlm_repro.engine.optim.gradients import GradientReducer
from mlm_repro.engine.optim.precision import DTYPES, LossScaler
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.engine.parallel.sharding import sharded_parameters
from mlm_repro.engine.run.files import read_metrics
from tests.engine.small_run import in_two_sessions, small_config, train


@given(
    st.lists(
        st.sampled_from([(True, 1), (True, 3), (False, 1), (False, 999), (False, 1000)]),
        max_size=12,
    ),
    st.integers(-1, 3),
    st.integers(0, 12),
)
def test_the_loss_scale_is_megatron_core_s(
    outcomes: list[tuple[bool, int]], start: int, stop: int
) -> None:
    """Overflows, of which the first after a growth is tolerated, and clean iterations; ours is
    stopped and goes on."""
    with pytest.MonkeyPatch.context() as patch:
        # Device is "cuda".
        patch.setattr(torch, "tensor", lambda values, dtype, device: torch.Tensor(values).to(dtype))
        theirs = DynamicGradScaler(2.0**start if start > 0 else 1.0, 1.0, 2.0, 0.5, 1000, 2)
    ours = LossScaler(theirs.scale.item())
    for place, (overflow, times) in enumerate(outcomes):
        if place == stop:
            ours = LossScaler(**json.loads(json.dumps(asdict(ours))))
        for _ in range(times):
            theirs.update(overflow)
            ours.update(overflow)
            assert ours.scale == theirs.scale.item()


def weights_after_small_updates(precision: Precision) -> tuple[list[float], FlatAdamW]:
    """The mean of weights that begin at 1, after each of 100 updates of 1e-4."""
    dtype = DTYPES[precision]
    model = nn.Linear(4, 4).to(dtype)
    nn.init.ones_(model.weight)
    mesh = serial_mesh()
    train_config = TrainConfig(weight_decay=0.0, clip_gradient=0.0, precision=precision)
    optimizer = FlatAdamW(sharded_parameters(model, mesh), train_config, mesh)
    reducer = GradientReducer(optimizer.groups, mesh)
    values = []
    for _ in range(100):
        reducer.begin()
        model(torch.ones(1, 4, dtype=dtype)).sum().backward()
        reducer.finish(1)
        optimizer.step(1e-4, optimizer.gradient_norm())
        values.append(model.weight.detach().float().mean().item())
    return values, optimizer


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_updates_below_the_formats_resolution_add_up(precision: Precision) -> None:
    values, optimizer = weights_after_small_updates(precision)
    assert values[0] == 1.0  # 1e-4 is less than half the step below 1
    assert values[-1] == pytest.approx(0.99, abs=2e-3)
    assert {tensor.dtype for _, _, tensor in whole_state(optimizer)} == {torch.float32}


def test_pure_fp16_has_no_state_in_fp32_and_loses_such_updates() -> None:
    values, optimizer = weights_after_small_updates("fp16-pure")
    assert set(values) == {1.0}
    assert {(what, tensor.dtype) for _, what, tensor in whole_state(optimizer)} == {
        ("exp_avg", torch.float16),
        ("exp_avg_sq", torch.float16),
    }


def test_pure_fp16_trains_without_a_loss_scale(dataset: Path, tmp_path: Path) -> None:
    run = train(
        small_config(dataset, precision="fp16-pure", adam_epsilon=1e-4, iterations=10), tmp_path
    ).path
    lines = lines_of(run, "train")
    assert {line["loss_scale"] for line in lines} == {1.0}
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_gradients_of_microbatches_add_up_in_fp32() -> None:
    model = nn.Linear(1, 1).to(torch.bfloat16)
    mesh = serial_mesh()
    optimizer = FlatAdamW(sharded_parameters(model, mesh), TrainConfig(), mesh)
    reducer = GradientReducer(optimizer.groups, mesh)
    reducer.begin()
    for _ in range(1000):
        model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    reducer.finish(1)
    # Bf16 sums would stop at 256.
    assert optimizer.gradient_norm() == pytest.approx(1000 * math.sqrt(2))


FP16: dict[str, Any] = {
    "precision": "fp16",
    "initial_loss_scale": 2.0**32,
    "validation_interval": 1,
    "checkpoint_interval": 10,
    "keep_checkpoints": 9,
}


@pytest.fixture(scope="session")
def fp16(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_config(dataset, **FP16)
    return train(config, tmp_path_factory.mktemp("fp16")).path


def lines_of(run: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run) if line["kind"] == kind]


def test_bf16_learns(dataset: Path, uninterrupted: Path, tmp_path: Path) -> None:
    run = train(small_config(dataset, precision="bf16"), tmp_path).path
    losses = [line["loss"] for line in lines_of(run, "train")]
    fp32 = [line["loss"] for line in lines_of(uninterrupted, "train")]
    assert losses[0] == pytest.approx(fp32[0], abs=0.02)
    assert sum(losses[-5:]) / 5 == pytest.approx(sum(fp32[-5:]) / 5, abs=0.1)
    assert losses != fp32


def test_fp16_learns_once_the_scale_fits(fp16: Path) -> None:
    losses = [line["loss"] for line in lines_of(fp16, "train")]
    assert losses[0] == pytest.approx(math.log(290), abs=0.1)
    assert losses[-1] < losses[0] - 1


def test_fp16_overflow_skips_the_update(fp16: Path) -> None:
    lines = lines_of(fp16, "train")
    validation = [line["loss"] for line in lines_of(fp16, "validation")]
    overflowed = [line["gradient_norm"] is None for line in lines]
    assert 0 < sum(overflowed) < len(lines) / 2
    for i, skipped in enumerate(overflowed):
        assert (validation[i + 1] == validation[i]) == skipped, lines[i]
    state = json.loads(
        (fp16 / "checkpoints" / "iter_0000060" / "state.json").read_text(encoding="utf-8")
    )
    assert state["iteration"] == 60
    assert state["optimizer_steps"] == 60 - sum(overflowed)


def test_fp16_scale_follows_the_rule_and_the_schedule_waits(fp16: Path) -> None:
    lines, scaler, steps = lines_of(fp16, "train"), LossScaler(2.0**32), 0
    for line in lines:
        assert line["loss_scale"] == scaler.scale
        assert line["learning_rate"] == pytest.approx(3e-3 * (steps + 1) / 5) or steps >= 5
        overflow = line["gradient_norm"] is None
        steps += not overflow
        scaler.update(overflow)
    assert lines[1]["loss_scale"] == lines[0]["loss_scale"] == 2 * lines[2]["loss_scale"]


@pytest.mark.parametrize("stop_after", [9, 30])
def test_a_resumed_fp16_run_has_the_same_scales_and_skips(
    stop_after: int, fp16: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stop is among the overflows, with half of the tolerance used; the second after
    them."""
    config = small_config(dataset, **FP16)
    run = in_two_sessions(config, tmp_path, stop_after, monkeypatch)
    names = ("loss", "loss_scale", "skipped", "gradient_norm", "learning_rate")
    scales = [[line[name] for name in names] for line in lines_of(run, "train")]
    assert scales == [[line[name] for name in names] for line in lines_of(fp16, "train")]
    assert any(skipped for _, _, skipped, *_ in scales[stop_after:]) == (stop_after == 9)
    last = "checkpoints/iter_0000060/state.json"
    ours, theirs = (json.loads((one / last).read_text(encoding="utf-8")) for one in (run, fp16))
    assert {**ours, "seconds": 0} == {**theirs, "seconds": 0}
