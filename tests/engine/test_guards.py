"""What guards say of a training's numbers: noise scale, loss spikes, slow ranks."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_repro.engine.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from mlm_repro.engine.data.batches import TrainingOrder
from mlm_repro.engine.guard import Iteration
from mlm_repro.engine.guard.guards import (
    DEVIATIONS,
    LEAST,
    LEAST_SECONDS,
    RATIO,
    NoiseScaleGuard,
    RecentIterations,
    gradient_moments,
    noise_scale,
    slow_ranks,
)
from mlm_repro.engine.guard.guards import SPIKE_WINDOW as WINDOW
from mlm_repro.engine.launch.mesh import build_mesh
from mlm_repro.engine.model.microbatch import PipelineInput
from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.engine.run.files import read_metrics, read_steps
from mlm_repro.engine.step import Gradient, build_step
from mlm_repro.lineage.config import parse_config
from mlm_repro.lineage.errors import BadInput
from tests.engine.small_run import assert_same_training, in_two_sessions, mlm_train, small_config, train, write_toml
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


SPIKE = LEAST + 6
NARROW_MODEL = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "seq_length": 16}
SPIKY = {"iterations": SPIKE + 4, "checkpoint_interval": 40, "validation_interval": SPIKE + 4, "keep_checkpoints": 1}

quick = settings(max_examples=8)


@quick
@given(st.integers(0, 2**32 - 1), st.integers(0, 2 * WINDOW))
def test_the_rule_is_six_deviations_above_the_last_128(seed: int, cut: int) -> None:
    random = np.random.RandomState(seed)
    leaps = np.where(random.rand(2 * WINDOW, 2) < 0.02, random.rand(2 * WINDOW, 2) * 5, 0.0)
    seen = (3.0 + 0.2 * random.randn(2 * WINDOW, 2) + leaps).tolist()
    whole, recent = RecentIterations(), RecentIterations()
    for number, (loss, norm) in enumerate(seen):
        if number == cut:
            before, recent = recent, RecentIterations()  # as a resumed run
            recent.seen.extend(before.seen)
        spike = recent.add(loss, norm)
        assert spike == whole.add(loss, norm)
        before = np.array(seen[max(number - WINDOW, 0) : number])
        if len(before) < LEAST:
            assert spike == {}
            continue
        limits = before.mean(axis=0) + DEVIATIONS * before.std(axis=0, ddof=1)
        for name, value, limit in zip(("loss", "gradient_norm"), (loss, norm), limits, strict=True):
            if not math.isclose(value, limit, rel_tol=1e-9, abs_tol=1e-9):
                assert (name in spike) == (value > limit)
            if name in spike:
                assert spike[name] == pytest.approx(limit)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_overflow_is_not_remembered(value: float) -> None:
    recent = RecentIterations()
    recent.add(2.0, 1.0)
    assert recent.add(2.0, value) == {}
    assert list(recent.seen) == [(2.0, 1.0)]


@pytest.fixture
def bad_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Iteration SPIKE trains on a token that no text has, again and again."""
    microbatches = TrainingOrder.microbatches

    def planted(self: TrainingOrder, iteration: int, *where: int) -> Any:
        for batch in microbatches(self, iteration, *where):
            yield replace(batch, tokens=np.zeros_like(batch.tokens)) if iteration + 1 == SPIKE else batch

    monkeypatch.setattr(TrainingOrder, "microbatches", planted)


@pytest.mark.usefixtures("bad_batch")
@pytest.mark.parametrize("skip", [False, True])
def test_a_spike_is_recorded_and_skipped_if_asked(
    skip: bool, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(dataset, NARROW_MODEL, skip_spikes=skip, **SPIKY)
    whole = train(config, tmp_path / "whole").path
    lines = {line["iteration"]: line for line in read_metrics(whole) if line["kind"] == "train"}
    assert [number for number, line in lines.items() if line["spike"]] == [SPIKE]
    assert lines[SPIKE]["gradient_norm"] > lines[SPIKE]["spike"]["gradient_norm"]
    assert [number for number, line in lines.items() if line["skipped"]] == ([SPIKE] if skip else [])
    done = "no update was made" if skip else "the update was made"
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(said) == 1
    assert said[0].startswith(f"warning: iteration {SPIKE} is a spike, ")
    assert said[0].endswith(done)
    if skip:
        resumed = in_two_sessions(config, tmp_path / "resumed", SPIKE - 2, monkeypatch)
        assert_same_training(resumed, whole)
        assert [line["iteration"] for line in read_metrics(resumed) if line.get("skipped")] == [SPIKE]


LAYOUT = Layout(tp=2, pp=2, dp=2)


@given(st.lists(st.floats(1.0, 1.4), min_size=8, max_size=8), st.integers(0, 7), st.floats(0.0, 10.0))
def test_a_rank_is_held_to_those_of_its_stage(seconds: list[float], rank: int, delay: float) -> None:
    stage = [other for other in range(8) if other // 4 == rank // 4 and other != rank]
    usual = sorted(seconds[other] for other in stage)[1]
    seconds[rank] += delay
    is_slow = seconds[rank] > RATIO * usual and seconds[rank] - usual >= LEAST_SECONDS
    assert slow_ranks(seconds, LAYOUT) == ({rank: usual} if is_slow else {})


def test_stages_of_one_rank_are_held_to_none() -> None:
    assert slow_ranks([1.0, 9.0], Layout(pp=2)) == {}
    assert slow_ranks([0.001, 0.01], Layout(dp=2)) == {}
    assert slow_ranks([1.0, 9.0], Layout(tp=2)) == {1: 1.0}


def test_a_slow_rank_is_named_within_twenty_iterations(dataset: Path, tmp_path: Path) -> None:
    toml = write_toml(tmp_path / "small.toml", dataset, iterations=20)
    code, _, err = mlm_train(toml, f"--runs={tmp_path}", "--ranks=2", plant="slow_seconds=0.15")
    assert code == 0, err
    assert err.count("warning: rank 1 is slow and holds up the others: ") == 1, err
    assert "rank 0 is slow" not in err
