"""`mlm-bench pipeline`: every schedule is measured as the engine runs it, and all train the same."""

from dataclasses import replace
from typing import Any

import pytest

from engine.pipeline.schedule import compute_orders
from experiments.bench.pipeline import MICROBATCHES, SCHEDULES, SIZE, disagreements, measure_pipeline
from experiments.bench.table import show_pipeline

SHAPE = {"num_layers": 4, "hidden_size": 32, "num_heads": 2, "seq_length": 16, "vocab_size": 64}
TINY = replace(
    SIZE,
    model=SIZE.model.model_copy(update=SHAPE | {"padded_vocab_size": 64}),
    train=SIZE.train.model_copy(update={"iterations": 2}),
)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return measure_pipeline(TINY)


def test_a_timeline_is_the_instruction_list_in_order_of_time(result: dict[str, Any]) -> None:
    assert [one["schedule"] for one in result["timelines"]] == ["gpipe", "1f1b", "interleaved"]
    for parallel, one in zip(SCHEDULES, result["timelines"], strict=True):
        orders = compute_orders(parallel.schedule, parallel.pp, parallel.chunks, MICROBATCHES)
        for part in ("planned", "measured"):
            assert [[tuple(row[:3]) for row in rank] for rank in one[part]] == [list(map(tuple, o)) for o in orders]
        for rank in one["measured"]:
            times = [time for row in rank for time in row[3:]]
            assert times == sorted(times)


def test_a_forward_pass_ends_on_one_stage_before_it_begins_on_the_next(result: dict[str, Any]) -> None:
    for parallel, one in zip(SCHEDULES, result["timelines"], strict=True):
        times = {
            (row[0], row[1], row[2] * parallel.pp + place): row[3:]
            for place, rank in enumerate(one["measured"])
            for row in rank
        }
        last = parallel.pp * parallel.chunks - 1
        for number in range(MICROBATCHES):
            for stage in range(last):
                assert times["F", number, stage][1] <= times["F", number, stage + 1][0]
                assert times["B", number, stage + 1][1] <= times["B", number, stage][0]


def test_all_schedules_train_the_same_and_the_load_is_said(
    result: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert result["disagreements"] == []
    assert len(result["load_average"]) == 1 + len(SCHEDULES)
    show_pipeline(result)
    printed = capsys.readouterr().out
    assert "interleaved" in printed
    assert "load average" in printed


def test_a_schedule_that_trains_differently_is_named() -> None:
    (sentence,) = disagreements({"gpipe": [2.0, 1.0], "1f1b": [2.0, 1.0], "interleaved": [2.0, 1.1]})
    assert sentence == "losses of interleaved differ from those of gpipe by up to 0.1"
    assert disagreements({"gpipe": [2.0], "1f1b": [float("nan")]})
