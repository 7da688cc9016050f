"""A growing batch is Megatron-LM's, and its samples come once each, in one order, on any layout and
after any stop."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlm_repro.engine.batch_schedule import BatchSchedule
from mlm_repro.engine.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from mlm_repro.engine.costs import tokens_trained
from mlm_repro.engine.data.dataset import DatasetFacts
from mlm_repro.engine.family import family_of
from mlm_repro.engine.parallel.layout import layout_of
from mlm_repro.engine.run.files import read_metrics, read_summary
from mlm_repro.engine.twin import shrink
from mlm_repro.lineage.errors import BadInput
from tests.engine.small_run import assert_same_training, in_two_sessions, small_config, train

GROWING: dict[str, Any] = {
    "rampup_batch_size": [2, 2, 18],
    "global_batch_size": 8,
    "microbatch_size": 2,
    "iterations": 12,
    "checkpoint_interval": 6,
    "validation_interval": 20,
}


@given(
    start=st.integers(1, 20),
    increment=st.integers(1, 10),
    steps=st.integers(1, 12),
    samples=st.integers(1, 2000),
)
def test_every_iteration_has_the_batch_of_megatron_core(
    start: int, increment: int, steps: int, samples: int
) -> None:
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    largest = start + steps * increment
    theirs = RampupBatchsizeNumMicroBatchesCalculator(
        largest, 1, 1, False, 1, start, increment, samples
    )
    ramp = (start, increment, samples)
    ours = BatchSchedule(
        TrainConfig(global_batch_size=largest, microbatch_size=1, rampup_batch_size=ramp)
    )
    taken = 0
    for iteration in range(60):
        assert ours.samples_before(iteration) == taken
        theirs.update(taken, consistency_check=False)
        found = theirs.get_current_global_batch_size()
        # Where theirs depends on how a division in floating point rounds.
        on_edge = taken * steps % samples == 0
        assert found == ours.batch_size(iteration) or (
            on_edge and found == ours.batch_size(iteration) - increment
        )
        taken += ours.batch_size(iteration)


def test_a_run_takes_each_sample_once_and_says_how_many(dataset: Path, tmp_path: Path) -> None:
    config = small_config(dataset, **GROWING)
    run = train(config, tmp_path / "whole").path
    lines = [line for line in read_metrics(run) if line["kind"] == "train"]
    sizes = [line["batch_size"] for line in lines]
    # 6 samples a step, as far as whole iterations allow.
    assert sizes == [
        2,
        2,
        2,
        4,
        4,
        6,
        *[8] * 6,
    ]
    assert [line["samples"] for line in lines] == [sum(sizes[:end]) for end in range(1, 13)]
    assert read_summary(run).tokens == tokens_trained(config.model, config.train) == sum(sizes) * 32


@pytest.mark.parametrize("stop_after", [2, 5])
def test_a_stop_on_the_way_up_changes_nothing(
    stop_after: int, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    xl = {"family": "transformer-xl", "transformer_xl": {"memory_length": 16}, "dropout": 0.0}
    config = small_config(dataset, model=xl if stop_after == 5 else None, **GROWING)
    whole = train(config, tmp_path / "whole").path
    assert_same_training(
        in_two_sessions(config, tmp_path / "parts", stop_after, monkeypatch), whole
    )


def test_the_rate_of_a_growing_batch_moves_by_the_samples_of_updates(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Megatron-Core's scheduler, which a skipped update does not move; fp16 from so large a
    scale skips some."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    settings = {
        "clock": "samples",
        "decay": "cosine",
        "decay_iterations": 7.5,
        "warmup_iterations": 1.25,
    }
    config = small_config(
        dataset, **GROWING, **settings, precision="fp16", initial_loss_scale=2.0**23
    )
    whole = train(config, tmp_path / "whole").path
    theirs = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group := {}]),
        0.0,
        3e-3,
        1e-4,
        10,
        60,
        "cosine",
        0.0,
        0.0,
        1,
        "constant",  # type: ignore[arg-type]
    )
    lines = [line for line in read_metrics(whole) if line["kind"] == "train"]
    for line in lines:
        assert line["learning_rate"] == pytest.approx(group["lr"], rel=1e-12), line
        theirs.step(0 if line["skipped"] else line["batch_size"])
    assert 0 < sum(line["skipped"] for line in lines) < 10
    assert_same_training(in_two_sessions(config, tmp_path / "parts", 5, monkeypatch), whole)


@pytest.mark.parametrize("dp", [1, 2])
def test_ranks_share_one_order_of_samples(dp: int, dataset: Path) -> None:
    config = small_config(dataset, **GROWING)
    batches = family_of(config.model).training_order(
        config, DatasetFacts.read(dataset).token_files("train"), 12, None
    )
    seen: dict[int, list[int]] = {}
    for iteration, before in ((2, 4), (3, 6), (5, 14), (6, 20), (7, 28)):
        for rank in range(dp):
            for one in (
                batches.microbatches(iteration, rank, dp) if dp == 1 or iteration > 5 else ()
            ):
                seen |= {
                    before + place: row.tolist()
                    for place, row in zip(one.places, one.tokens, strict=True)
                }
    assert {*range(20, 36)} <= seen.keys()
    assert all(row == batches.take([number], ()).tokens[0].tolist() for number, row in seen.items())


@pytest.mark.parametrize(
    ("ramp", "sentence"),
    [
        ([0, 2, 10], "0 should be greater than 0"),
        ([3, 2, 10], "3 plus steps of 2 never gives global_batch_size = 8"),
        ([5, 3, 10], "must be multiples of microbatch_size = 2"),
    ],
)
def test_a_ramp_that_does_not_fit_is_refused(ramp: list[int], sentence: str, dataset: Path) -> None:
    with pytest.raises(BadInput, match=sentence):
        small_config(dataset, **(GROWING | {"rampup_batch_size": ramp}))


def test_a_ramp_is_divided_over_ranks_or_refused() -> None:
    model = ModelConfig(num_layers=4, hidden_size=16, num_heads=4)
    growing = TrainConfig(global_batch_size=16, microbatch_size=1, rampup_batch_size=(4, 4, 100))
    config = RunConfig(name="ramp", model=model, train=growing)
    assert layout_of(config, 4).dp == 4
    with pytest.raises(
        BadInput,
        match=r"batch's sizes, 4 times microbatch_size = 1, does not divide over 8 data-par",
    ):
        layout_of(config, 8)
    interleaved = ParallelConfig(pp=2, chunks=2, schedule="interleaved")
    with pytest.raises(BadInput, match="and not every batch size of"):
        layout_of(config.model_copy(update={"parallel": interleaved}), 8)
    with pytest.raises(BadInput, match="a growing batch has no twin"):
        shrink(config)


def test_a_growing_batch_keeps_a_memory_of_text_on_its_rank_or_is_refused() -> None:
    """On two ranks the streams 2 and 3 of a batch of 8 belong to rank 0, and of a batch of 4 to
    rank 1, where their memory stayed."""
    model = ModelConfig(
        family="transformer-xl",
        num_layers=2,
        hidden_size=16,
        num_heads=4,
        transformer_xl={"memory_length": 8},  # type: ignore[arg-type]
    )
    growing = TrainConfig(global_batch_size=8, microbatch_size=2, rampup_batch_size=(4, 4, 100))
    config = RunConfig(name="ramp", model=model, train=growing)
    assert layout_of(config, 1).dp == 1
    with pytest.raises(BadInput, match=r"leave train\.rampup_batch_size out, or take 1 ranks"):
        layout_of(config, 2)
