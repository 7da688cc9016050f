"""What guards say of a training's numbers: noise scale, loss spikes, slow ranks."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_repro.engine.config import ModelConfig
from mlm_repro.engine.data.batches import TrainingOrder
from mlm_repro.engine.guard.guards import (
    DEVIATIONS,
    LEAST,
    LEAST_SECONDS,
    RATIO,
    RecentIterations,
    slow_ranks,
)
from mlm_repro.engine.guard.guards import SPIKE_WINDOW as WINDOW
from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.engine.run.files import read_metrics
from tests.engine.small_run import (
    assert_same_training,
    in_two_sessions,
    mlm_train,
    small_config,
    train,
    write_toml,
)

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=16,
    num_heads=4,
    seq_length=8,
    vocab_size=29,
    padded_vocab_size=32,
    dropout=0.0,
)
TOKENS = np.random.RandomState(0).randint(0, MODEL.vocab_size, (8, 9))


SPIKE = LEAST + 6
NARROW_MODEL = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "seq_length": 16}
SPIKY = {
    "iterations": SPIKE + 4,
    "checkpoint_interval": 40,
    "validation_interval": SPIKE + 4,
    "keep_checkpoints": 1,
}

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
            yield (
                replace(batch, tokens=np.zeros_like(batch.tokens))
                if iteration + 1 == SPIKE
                else batch
            )

    monkeypatch.setattr(TrainingOrder, "microbatches", planted)


@pytest.mark.usefixtures("bad_batch")
@pytest.mark.parametrize("skip", [False, True])
def test_a_spike_is_recorded_and_skipped_if_asked(
    skip: bool,
    dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = small_config(dataset, NARROW_MODEL, skip_spikes=skip, **SPIKY)
    whole = train(config, tmp_path / "whole").path
    lines = {line["iteration"]: line for line in read_metrics(whole) if line["kind"] == "train"}
    assert [number for number, line in lines.items() if line["spike"]] == [SPIKE]
    assert lines[SPIKE]["gradient_norm"] > lines[SPIKE]["spike"]["gradient_norm"]
    assert [number for number, line in lines.items() if line["skipped"]] == (
        [SPIKE] if skip else []
    )
    done = "no update was made" if skip else "the update was made"
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(said) == 1
    assert said[0].startswith(f"warning: iteration {SPIKE} is a spike, ")
    assert said[0].endswith(done)
    if skip:
        resumed = in_two_sessions(config, tmp_path / "resumed", SPIKE - 2, monkeypatch)
        assert_same_training(resumed, whole)
        assert [line["iteration"] for line in read_metrics(resumed) if line.get("skipped")] == [
            SPIKE
        ]


LAYOUT = Layout(tp=2, pp=2, dp=2)


@given(
    st.lists(st.floats(1.0, 1.4), min_size=8, max_size=8), st.integers(0, 7), st.floats(0.0, 10.0)
)
def test_a_rank_is_held_to_those_of_its_stage(
    seconds: list[float], rank: int, delay: float
) -> None:
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
