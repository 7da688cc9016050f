"""Loss spikes: what is called one, and that skipping one is recorded and survives a resume."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.data.batches import TrainingBatches
from engine.guard.guards import DEVIATIONS, LEAST, RecentIterations
from engine.guard.guards import SPIKE_WINDOW as WINDOW
from engine.run.files import read_metrics
from tests.engine.small_run import assert_same_training, in_two_sessions, small_config, train

SPIKE = LEAST + 6
MODEL = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "seq_length": 16}
RECIPE = {"iterations": SPIKE + 4, "checkpoint_interval": 40, "validation_interval": SPIKE + 4, "keep_checkpoints": 1}

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
            recent = RecentIterations(recent.state())  # as a resumed run
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
    assert recent.state() == ((2.0, 1.0),)


@pytest.fixture
def bad_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Iteration SPIKE trains on a token that no text has, again and again."""
    microbatches = TrainingBatches.microbatches

    def planted(self: TrainingBatches, iteration: int, *where: int) -> Any:
        for batch in microbatches(self, iteration, *where):
            yield replace(batch, tokens=np.zeros_like(batch.tokens)) if iteration + 1 == SPIKE else batch

    monkeypatch.setattr(TrainingBatches, "microbatches", planted)


@pytest.mark.usefixtures("bad_batch")
@pytest.mark.parametrize("skip", [False, True])
def test_a_spike_is_recorded_and_skipped_if_asked(
    skip: bool, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(dataset, MODEL, skip_spikes=skip, **RECIPE)
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
