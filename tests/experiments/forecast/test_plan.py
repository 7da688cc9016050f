"""A ladder is as large as its budget pays for, and says what would be too little."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.costs import parameter_count
from experiments.forecast.ladder_plan import (
    FEWEST_RUNGS,
    MOST_EPOCHS,
    SHAPES,
    TOKENS_PER_PARAMETER,
    describe_plan,
    make_plan,
    rung_config,
    seconds_of,
)
from experiments.forecast.trainings import SEARCH_SEED
from lineage.errors import BadInput

VOCABULARY, CORPUS = 1024, 9_000_000


def speeds(flops: float) -> list[float]:
    return [6 * (12 * one.layers * one.width**2 + VOCABULARY * one.width) / flops for one in SHAPES]


@given(st.floats(900, 22_000), st.integers(1, 8), st.floats(4e10, 2e11))
def test_a_plan_stays_within_its_budget_and_reads_the_text_at_most_four_times(
    budget: float, cores: int, flops: float
) -> None:
    try:
        plan = make_plan(budget, cores, speeds(flops), VOCABULARY, CORPUS, is_scored=True)
    except BadInput:
        with pytest.raises(BadInput, match="is too small for 4 rungs"):
            make_plan(budget, cores, speeds(flops), VOCABULARY, CORPUS, is_scored=True)
        return
    assert plan.expected_seconds <= budget
    assert plan.epochs <= MOST_EPOCHS * 1.001
    assert len(plan.rungs) >= FEWEST_RUNGS
    assert plan.tokens >= TOKENS_PER_PARAMETER * plan.rungs[-1].parameters


def test_sizes_rise_by_about_1_8() -> None:
    sizes = [12 * one.layers * one.width**2 for one in SHAPES]
    for smaller, larger in pairwise(sizes):
        assert 1.4 < larger / smaller < 2.1
    mean = (sizes[-1] / sizes[0]) ** (1 / (len(sizes) - 1))
    assert 1.6 < mean < 2.0


def test_half_an_hour_on_two_cores_pays_for_four_rungs_and_six_hours_for_seven() -> None:
    half_hour, six_hours = (
        make_plan(seconds, 2, speeds(6e10), VOCABULARY, CORPUS, is_scored=True) for seconds in (1800, 21600)
    )
    unscored = make_plan(1800, 2, speeds(6e10), VOCABULARY, CORPUS, is_scored=False)
    assert unscored.tokens > half_hour.tokens
    assert unscored.expected_seconds == pytest.approx(half_hour.expected_seconds, rel=0.05)
    assert len(half_hour.rungs) >= 4
    assert len(six_hours.rungs) == 7
    assert six_hours.expected_seconds >= 0.8 * 21600 or six_hours.epochs == pytest.approx(MOST_EPOCHS, rel=0.01)
    assert "the law is fitted to 6 sizes" in describe_plan(six_hours)


def test_a_trial_and_a_training_have_the_sizes_of_their_rung(tmp_path: Path) -> None:
    plan = make_plan(7200, 2, speeds(6e10), VOCABULARY, CORPUS, is_scored=True)
    for number, rung in enumerate(plan.rungs):
        config = rung_config(plan, number, 1, 0.004, tmp_path)
        model = config.model.model_copy(update={"vocab_size": VOCABULARY, "padded_vocab_size": VOCABULARY})
        assert parameter_count(model) == rung.parameters
        trial = rung_config(plan, number, SEARCH_SEED, 0.004, tmp_path)
        assert trial.train.warmup_iterations == config.train.warmup_iterations
        assert trial.name != config.name


@pytest.mark.parametrize(
    ("budget", "corpus", "words"),
    [
        (60, CORPUS, "a budget of 1:00 is too small for 4 rungs on 2 cores: the least is"),
        (1800, 10_000, "10,000 tokens of training text are too few"),
    ],
)
def test_too_little_is_refused(budget: float, corpus: int, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        make_plan(budget, 2, speeds(6e10), VOCABULARY, corpus, is_scored=False)


def test_budgets_are_times() -> None:
    assert [seconds_of(text) for text in ("90s", "30m", "1.5h")] == [90, 1800, 5400]
    for text in ("", "30", "m", "-3m", "2d"):
        with pytest.raises(BadInput, match="invalid budget"):
            seconds_of(text)
