"""`mlm-bench pipeline`: every schedule is measured as the engine runs it, and all train the same."""

from dataclasses import replace

import pytest

from engine.pipeline.schedule import compute_orders
from experiments.bench.benchmarks.pipeline import MICROBATCHES, RANKS, SCHEDULES, measure_schedules, size
from experiments.bench.show import show
from lineage.benchmark import Benchmark

SHAPE = {"num_layers": 4, "hidden_size": 32, "num_heads": 2, "seq_length": 16, "vocab_size": 64}
TINY = replace(
    size(),
    model=size().model.model_copy(update=SHAPE | {"padded_vocab_size": 64}),
    train=size().train.model_copy(update={"iterations": 2}),
)


@pytest.fixture(scope="module")
def result() -> Benchmark:
    return measure_schedules(TINY)


def test_a_timeline_is_the_instruction_list_in_order_of_time(result: Benchmark) -> None:
    assert [case.name for case in result.cases] == ["gpipe", "1f1b", "interleaved"]
    for (schedule, chunks), one in zip(SCHEDULES.items(), (case.timeline for case in result.cases), strict=True):
        orders = compute_orders(schedule, RANKS, chunks, MICROBATCHES)
        for part in ("planned", "measured"):
            assert [[tuple(row[:3]) for row in rank] for rank in one[part]] == [list(map(tuple, o)) for o in orders]
        for rank in one["measured"]:
            times = [time for row in rank for time in row[3:]]
            assert times == sorted(times)


def test_a_forward_pass_ends_on_one_stage_before_it_begins_on_the_next(result: Benchmark) -> None:
    for chunks, one in zip(SCHEDULES.values(), (case.timeline for case in result.cases), strict=True):
        times = {
            (row[0], row[1], row[2] * RANKS + place): row[3:]
            for place, rank in enumerate(one["measured"])
            for row in rank
        }
        last = RANKS * chunks - 1
        for number in range(MICROBATCHES):
            for stage in range(last):
                assert times["F", number, stage][1] <= times["F", number, stage + 1][0]
                assert times["B", number, stage + 1][1] <= times["B", number, stage][0]


def test_all_schedules_train_the_same_and_the_load_is_said(
    result: Benchmark, capsys: pytest.CaptureFixture[str]
) -> None:
    assert result.disagreements == []
    assert len(result.load_average) == 1
    show(result)
    printed = capsys.readouterr().out
    assert "interleaved" in printed
    assert all(one.samples[0] >= 0 for case in result.cases for one in case.series)
    assert "Load average" in printed
