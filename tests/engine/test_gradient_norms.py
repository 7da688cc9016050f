"""Every path of the training step reports and clips by the true norm of the gradient, however it is divided."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import ModelConfig, ParallelConfig, TrainConfig
from engine.launch.mesh import build_mesh
from engine.launch.threads import run_threads
from engine.model.gpt2 import GPT2
from engine.model.microbatch import to_input
from engine.parallel.layout import Layout
from engine.parallel.mesh import serial_mesh
from engine.step import build_step
from tests.ranks import run_ranks

MODEL = ModelConfig(
    num_layers=2, hidden_size=16, num_heads=2, seq_length=8, vocab_size=50, padded_vocab_size=64, dropout=0.0
)  # fmt: skip
TRAIN = TrainConfig(
    iterations=2, global_batch_size=4, microbatch_size=1, warmup_iterations=0, precision="fp64", clip_gradient=0.5,
    optimizer="adam", learning_rate=1e-3,
)  # fmt: skip
TOKENS = np.random.default_rng(5).integers(0, 50, (4, 9))

PATHS: dict[str, tuple[Layout, ParallelConfig]] = {
    "data": (Layout(dp=2), ParallelConfig()),
    "optimizer divided (ZeRO 1)": (Layout(dp=2), ParallelConfig(shard_optimizer=True)),
    "everything divided (ZeRO 3)": (Layout(dp=2), ParallelConfig(shard_parameters=True)),
    "tensor": (Layout(tp=2), ParallelConfig(tp=2)),
    "tensor and sequence": (Layout(tp=2), ParallelConfig(tp=2, sequence_parallel=True)),
    "pipeline": (Layout(pp=2), ParallelConfig(pp=2)),
}


def true_norm() -> float:
    """By torch alone: autograd through the whole model, one batch, no reducer and no optimizer of ours."""
    model = GPT2(MODEL, serial_mesh()).to(torch.float64)
    model.initialize(TRAIN.seed)
    tokens = torch.from_numpy(TOKENS)
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    return math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))


def steps(layout: Layout, parallel: ParallelConfig) -> tuple[float, float]:
    """The reported norm of the first gradient, and the norm of all weights after one clipped update."""
    mesh = build_mesh(layout, parallel.sequence_parallel)
    model, step = build_step(MODEL, TRAIN, parallel, mesh)
    mine = TOKENS[mesh.dp.rank :: mesh.dp.size]
    norm = step.run([to_input(row[None], mesh) for row in mine], TRAIN.learning_rate).norm
    square = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters:
        if parameter.is_counted:
            square += parameter.local.detach().square().sum()
    for axis in (model.storage_mesh.tp, mesh.pp):
        axis.all_reduce(square)
    return norm, math.sqrt(square.item())


@pytest.mark.parametrize("path", PATHS)
def test_the_norm_is_the_true_one(path: str) -> None:
    expected = true_norm()
    assert expected > 2 * TRAIN.clip_gradient  # a rank's own share would be clipped otherwise than the whole
    _, weights = run_threads(steps, 1, Layout(), ParallelConfig())[0]
    run = run_ranks if PATHS[path][1].shard_parameters else run_threads  # torch's FSDP2 needs processes
    for norm, updated in run(steps, 2, *PATHS[path]):
        assert norm == pytest.approx(expected, rel=1e-10)
        assert updated == pytest.approx(weights, rel=1e-10)


def test_a_norm_of_one_rank_alone_would_be_seen() -> None:
    """What each rank of ZeRO 3 would clip by if the norms of its shards were not added up."""
    alone: Any = run_ranks(norm_of_own_shards, 2)
    assert all(abs(norm - true_norm()) > 0.01 * true_norm() for norm in alone)


def norm_of_own_shards() -> float:
    mesh = build_mesh(Layout(dp=2))
    _, step = build_step(MODEL, TRAIN, ParallelConfig(shard_parameters=True), mesh)
    step.gradient([to_input(row[None], mesh) for row in TOKENS[mesh.dp.rank :: 2]])
    return math.sqrt(sum(float(group.main_gradient.square().sum()) for group in step.optimizer.groups))
