"""The noise scale of gradients that are known, and of those that data-parallel training measures at any layout."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from engine.guard import Iteration
from engine.guard.guards import NoiseScaleGuard, gradient_moments, noise_scale
from engine.launch.mesh import build_mesh
from engine.model.microbatch import PipelineInput
from engine.parallel.layout import Layout
from engine.run.files import read_steps
from engine.step import Gradient, build_step
from lineage.config import parse_config
from lineage.errors import BadInput
from tests.engine.small_run import small_config, train
from tests.ranks import run_ranks

MODEL = ModelConfig(
    num_layers=4, hidden_size=16, num_heads=4, seq_length=8, vocab_size=29, padded_vocab_size=32, dropout=0.0
)
TOKENS = np.random.RandomState(0).randint(0, MODEL.vocab_size, (8, 9))


@pytest.mark.parametrize(("noise", "ranks", "local"), [(0.5, 4, 8), (2.0, 8, 4), (5.0, 2, 16)])
def test_a_quadratics_noise_scale_is_found(noise: float, ranks: int, local: int) -> None:
    """Loss ½(x − c)ᵀH(x − c) with a centre c ~ N(0, noise²) for each sample: G = Hx and Σ = noise²·H²."""
    random = np.random.RandomState(0)
    curvature, x = np.linspace(0.5, 2.0, 50), np.ones(50)
    expected = noise**2 * (curvature**2).sum() / ((curvature * x) ** 2).sum()
    moments = []
    for _ in range(400):
        gradients = curvature * (x - noise * random.randn(ranks, local, 50))
        of_ranks = gradients.mean(axis=1)
        local_square = (of_ranks**2).sum(axis=1).mean()
        moments.append(gradient_moments(local_square, local, (of_ranks.mean(axis=0) ** 2).sum(), ranks * local))
    assert noise_scale(moments) == pytest.approx(expected, rel=0.1)


def squares(layout: Layout, parallel: ParallelConfig, rows: tuple[int, ...]) -> tuple[float, float]:
    """Squared norms of the data-parallel ranks' gradients, on average, and of the gradient of all `rows`."""
    mesh = build_mesh(layout, parallel.sequence_parallel)
    _, step = build_step(MODEL, TrainConfig(precision="fp64", seed=1), parallel, mesh, measures_noise=True)
    own = torch.from_numpy(TOKENS[list(rows)]).chunk(mesh.dp.size)[mesh.dp.rank]
    microbatches = [PipelineInput(each[:, :-1], each[:, 1:]) for each in own.split(1)]
    gradient = step.gradient(microbatches)
    return gradient.local_square, gradient.norm**2


@cache
def by_hand() -> tuple[float, float]:
    """The same of the serial model, which computes each rank's gradient and the whole one apart."""
    rows = tuple(range(len(TOKENS)))
    halves = (rows[:4], rows[4:])
    serial = [run_ranks(squares, 1, Layout(), ParallelConfig(), part)[0][1] for part in (*halves, rows)]
    return sum(serial[:2]) / 2, serial[2]


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (Layout(dp=2), {}),
        (Layout(tp=2, dp=2), {"sequence_parallel": True, "shard_optimizer": True}),
        (Layout(pp=2, dp=2), {"schedule": "interleaved", "chunks": 2}),
        (Layout(tp=2, pp=2, dp=2), {"sequence_parallel": True}),
    ],
)
def test_the_norms_are_those_of_the_gradients_computed_apart(layout: Layout, options: dict[str, Any]) -> None:
    parallel = ParallelConfig(tp=layout.tp, pp=layout.pp, **options)
    for found in run_ranks(squares, layout.world_size, layout, parallel, tuple(range(len(TOKENS)))):
        assert found == pytest.approx(by_hand(), rel=1e-10)


def train_measured(dataset: Path, root: Path) -> None:
    config = small_config(dataset, iterations=6, warmup_iterations=3, validation_interval=20)
    train(config.model_copy(update={"record": config.record.model_copy(update={"noise_scale": True})}), root)


def test_a_run_writes_the_estimates_and_their_scale(dataset: Path, tmp_path: Path) -> None:
    run_ranks(train_measured, 2, dataset, tmp_path)
    [run] = [path for path in tmp_path.iterdir() if not path.is_symlink()]
    steps = read_steps(run)
    moments = [(step.gradient_square, step.gradient_variance) for step in steps]
    for number, step in enumerate(steps, 1):
        square, variance = moments[number - 1]
        assert step.gradient_norm**2 == pytest.approx(square + variance / 8, rel=1e-6)
        assert step.noise_scale == noise_scale(moments[:number])


def test_an_iteration_without_a_gradient_counts_for_nothing(uninterrupted: Path) -> None:
    guard = NoiseScaleGuard(2)
    for gradient in (Gradient(1.0, math.nan, math.inf, 0), Gradient(1.0, 1.5, 3.0, 0)):
        iteration = Iteration(0, 8, [], gradient)
        iteration.line = read_steps(uninterrupted)[0]
        guard.after(iteration)
        line = iteration.line
        measured = (line.gradient_square, line.gradient_variance, line.noise_scale)
        moments = gradient_moments(3.0, 4, 2.25, 8)
        assert measured == ((*moments, noise_scale([moments])) if gradient.is_finite else (None, None, None))
    assert noise_scale([(-1.0, 5.0)]) is None
    assert noise_scale([]) is None


def test_shards_of_parameters_have_no_gradient_to_compare(dataset: Path) -> None:
    values = small_config(dataset).model_dump() | {
        "record": {"noise_scale": True},
        "parallel": {"shard_parameters": True},
    }
    with pytest.raises(BadInput, match="needs the whole gradient of each data-parallel rank"):
        parse_config(values, RunConfig, "the test")
