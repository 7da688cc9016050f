"""A rank that takes longer for its own work than its equals is named."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from engine.guard.ranks import LEAST_SECONDS, RATIO, slow_ranks
from engine.parallel.layout import Layout
from tests.engine.small_run import mlm_train, write_toml

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
