"""Data-parallel training measures the norms that the two-batch estimator wants, at any layout."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from engine.guard.noise_scale import GradientMoments, NoiseScaleGuard, gradient_moments, noise_scale
from engine.launch.mesh import build_mesh
from engine.model.microbatch import PipelineInput
from engine.parallel.layout import Layout
from engine.run.directory import read_metrics, read_steps
from engine.step import build_step
from engine.train import train
from lineage.config import parse_config
from lineage.errors import BadInput
from tests.engine.small_run import small_config
from tests.ranks import run_ranks

MODEL = ModelConfig(
    num_layers=4, hidden_size=16, num_heads=4, seq_length=8, vocab_size=29, padded_vocab_size=32, dropout=0.0
)
TOKENS = np.random.RandomState(0).randint(0, MODEL.vocab_size, (8, 9))


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
    config = small_config(dataset, iterations=6, validation_interval=20)
    train(config.model_copy(update={"record": config.record.model_copy(update={"noise_scale": True})}), root)


def test_a_run_writes_the_estimates_and_their_scale(dataset: Path, tmp_path: Path) -> None:
    run_ranks(train_measured, 2, dataset, tmp_path)
    [run] = [path for path in tmp_path.iterdir() if not path.is_symlink()]
    lines = [line for line in read_metrics(run) if line["kind"] == "train"]
    known = [GradientMoments(line["gradient_square"], line["gradient_variance"]) for line in lines]
    for number, line in enumerate(lines, 1):
        moments = known[number - 1]
        assert line["gradient_norm"] ** 2 == pytest.approx(moments.square + moments.variance / 8, rel=1e-6)
        assert line["noise_scale"] == noise_scale(known[:number])
    last, resumed = known[-1], NoiseScaleGuard(read_steps(run)[:-1], 2)
    _, scale = resumed.measure(last.square + last.variance / 4, lines[-1]["gradient_norm"], 8)
    assert scale == pytest.approx(lines[-1]["noise_scale"])


def test_an_iteration_without_a_gradient_counts_for_nothing() -> None:
    meter = NoiseScaleGuard([], 2)
    assert meter.measure(math.inf, math.nan, 8) == (None, None)
    moments = gradient_moments(3.0, 4, 2.25, 8)
    assert meter.measure(3.0, 1.5, 8) == (moments, noise_scale([moments]))


def test_shards_of_parameters_have_no_gradient_to_compare(dataset: Path) -> None:
    values = small_config(dataset).model_dump() | {
        "record": {"noise_scale": True},
        "parallel": {"shard_parameters": True},
    }
    with pytest.raises(BadInput, match="wants the gradient of each data-parallel rank, which none ever has"):
        parse_config(values, RunConfig, "the test")
