"""Adam and LAMB against their published formulas in float64, divided in any way, and over a
stop."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mlm_repro.engine.config import OPTIMIZERS, ParallelConfig, TrainConfig
from mlm_repro.engine.launch.threads import run_threads
from mlm_repro.engine.optim.adam import build_optimizer
from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.engine.parallel.sharding import sharded_parameters
from tests.engine.like_serial import assert_like_serial
from tests.engine.small_run import assert_same_training, in_two_sessions, small_config, train
from tests.engine.test_layouts import train_on

Array = np.ndarray[Any, np.dtype[np.float64]]


def published_step(
    optimizer: str,
    x: Array,
    m: Array,
    v: Array,
    g: Array,
    t: int,
    train: TrainConfig,
    decay: float,
    rate: float,
) -> tuple[Array, Array, Array]:
    """One tensor's step: Adam, Kingma & Ba Algorithm 1 with decoupled decay; LAMB, You et al.
    Algorithm 2, and as cybertronai/pytorch-lamb has it.
    """
    b1, b2, epsilon = train.adam_beta1, train.adam_beta2, train.adam_epsilon
    if optimizer == "lamb-2019-05":
        g, decay, rate = g + decay * x, 0.0, rate * outside(t, train)
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
    m_hat, v_hat = (
        (m, v)
        if optimizer in ("lamb-clamped", "lamb-2019-05")
        else (m / (1 - b1**t), v / (1 - b2**t))
    )
    r = m_hat / (np.sqrt(v_hat) + epsilon)
    if optimizer == "adam":
        return x - rate * (r + decay * x), m, v
    update = r + decay * x
    weight_norm, update_norm = np.sqrt((x**2).sum()), np.sqrt((update**2).sum())
    if optimizer == "lamb-clamped":
        weight_norm = min(max(weight_norm, 0.0), 10.0)
    ratio = weight_norm / update_norm if weight_norm > 0 and update_norm > 0 else 1.0
    if optimizer == "lamb-2019-05":
        ratio = min(ratio, 10.0)
    return x - rate * ratio * update, m, v


def outside(t: int, train: TrainConfig) -> float:
    """The bias correction that the code of 2019-05 has on the rate."""
    return float(np.sqrt(1 - train.adam_beta2**t) / (1 - train.adam_beta1**t))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@given(
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-6, 1.0, 30.0]),
    decay=st.sampled_from([0.0, 0.1]),
    epsilon=st.sampled_from([1e-8, 1e-6]),
)
@settings(max_examples=15)
def test_steps_equal_the_published_formulas(
    optimizer: str, seed: int, scale: float, decay: float, epsilon: float
) -> None:
    train = TrainConfig(
        optimizer=optimizer, weight_decay=decay, adam_epsilon=epsilon, clip_gradient=0
    )
    random = np.random.RandomState(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(scale * random.randn(*parameter.shape)))
        model[0].bias.zero_()
    named = dict(model.named_parameters())
    expected = {
        name: (p.detach().numpy().copy(), np.zeros(p.shape), np.zeros(p.shape))
        for name, p in named.items()
    }
    built = build_optimizer(sharded_parameters(model, serial_mesh()), train, serial_mesh())
    gradients = {
        parameter.local: view for group in built.groups for parameter, view in group.gradients
    }
    for t, rate in enumerate((1e-2, 3e-3, 5e-2), 1):
        for name, parameter in named.items():
            gradient = random.randn(*parameter.shape) * 10.0 ** random.randint(-3, 2)
            gradients[parameter].copy_(torch.from_numpy(gradient))
            x, m, v = expected[name]
            decayed = 0.0 if name.endswith("bias") else decay
            expected[name] = published_step(optimizer, x, m, v, gradient, t, train, decayed, rate)
        built.step(rate, built.gradient_norm())
    for name, parameter in named.items():
        np.testing.assert_allclose(
            parameter.detach().numpy(), expected[name][0], rtol=1e-10, atol=1e-14 * scale
        )


@pytest.mark.parametrize(
    ("optimizer", "layout", "parallel"),
    [
        ("lamb", Layout(tp=2, pp=2, dp=2), ParallelConfig(tp=2, pp=2, shard_optimizer=True)),
        ("lamb-clamped", Layout(tp=2), ParallelConfig(tp=2, sequence_parallel=True)),
    ],
)
def test_lamb_divides_like_the_serial_run(
    optimizer: str, layout: Layout, parallel: ParallelConfig
) -> None:
    serial = run_threads(train_on, 1, Layout(), ParallelConfig(), optimizer)[0]
    assert_like_serial(
        run_threads(train_on, layout.world_size, layout, parallel, optimizer), serial
    )


def test_lamb_goes_on_bit_for_bit(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(
        dataset,
        optimizer="lamb",
        iterations=12,
        checkpoint_interval=12,
        keep_checkpoints=1,
        precision="bf16",
    )
    expected = train(config, tmp_path / "whole").path
    assert_same_training(in_two_sessions(config, tmp_path / "halves", 5, monkeypatch), expected)


def steps_of(
    optimizer: str, scale: float, epsilon: float, wide: float = 1.0
) -> list[tuple[Array, Array, Array]]:
    """Weights of one tensor before and after each of 20 steps, with its weight norm and update
    norm."""
    train = TrainConfig(
        optimizer=optimizer, weight_decay=0.0, adam_epsilon=epsilon, clip_gradient=0
    )
    model = nn.Linear(64, 64, bias=False).double()
    random = np.random.RandomState(7)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(wide * random.randn(64, 64)))
    built = build_optimizer(sharded_parameters(model, serial_mesh()), train, serial_mesh())
    ((_, gradient),) = built.groups[0].gradients
    taken, norms = [], list[torch.Tensor]()
    norms_of: Any = built._norms  # type: ignore[attr-defined]

    def noted(*of: Any) -> torch.Tensor:
        norms.append(norms_of(*of))
        return norms[-1]

    built._norms = noted  # type: ignore[attr-defined]
    for _ in range(20):
        gradient.copy_(torch.from_numpy(scale * random.randn(64, 64)))
        before = model.weight.detach().numpy().copy()
        built.step(0.01, built.gradient_norm())
        taken.append((before, model.weight.detach().numpy().copy(), torch.cat(norms[-2:]).numpy()))
    return taken


LAMBS = [name for name in OPTIMIZERS if name.startswith("lamb")]


@pytest.mark.parametrize("optimizer", LAMBS)
def test_gradients_of_another_scale_are_another_epsilon_to_lamb(optimizer: str) -> None:
    """Equal bits: the ablation transformer-xl/trust-ratio scales ε in the place of the
    gradients."""
    for (_, one, _), (_, other, _) in zip(
        steps_of(optimizer, 1e-3, 1e-6), steps_of(optimizer, 1024e-3, 1024e-6), strict=True
    ):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("optimizer", LAMBS)
@pytest.mark.parametrize("wide", [1e-3, 1.0])
def test_a_step_of_lamb_is_as_long_whatever_its_gradients(optimizer: str, wide: float) -> None:
    """η·r₁, with η·√(1 − β₂ᵗ)/(1 − β₁ᵗ) in the place of η and at most ten times r₂ in the post's
    code."""
    train = TrainConfig()
    for scale in (1e-3, 1.0, 1e3):
        for t, (before, after, (weight_norm, update_norm)) in enumerate(
            steps_of(optimizer, scale, 0.0, wide), 1
        ):
            length = float(np.linalg.norm(after - before)) / 0.01
            assert weight_norm == pytest.approx(np.linalg.norm(before), rel=1e-12)
            if optimizer == "lamb":
                assert length == pytest.approx(weight_norm, rel=1e-6)
            elif optimizer == "lamb-clamped":
                assert length == pytest.approx(min(weight_norm, 10), rel=1e-6)
            else:
                assert length == pytest.approx(
                    outside(t, train) * min(weight_norm, 10 * update_norm), rel=1e-6
                )
            if t == 1:  # ±0.1/√0.001 for each of the 4,096 weights, or ±1 if it is corrected
                assert update_norm / 64 == pytest.approx(
                    1.0 if optimizer == "lamb" else math.sqrt(10), rel=1e-6
                )
