"""The learning rate against the schedule of the 2019 code and the later one."""

import re
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mlm_repro.engine.config import RunConfig, TrainConfig
from mlm_repro.engine.optim.schedule import learning_rate
from mlm_repro.engine.run.resolved import read_run
from mlm_repro.lineage.config import parse_config
from mlm_repro.lineage.errors import BadInput

Decay = Literal["clipped-cosine", "cosine", "linear"]
# Peak 1.5e-4, warm-up 3000, end 300,000, floor 1e-5.
GOLDEN: dict[Decay, dict[int, float]] = {
    "clipped-cosine": {
        50_000: 1.411e-4,
        100_000: 1.145e-4,
        150_000: 7.736e-5,
        200_000: 3.956e-5,
        250_000: 1.126e-5,
    },
    "cosine": {
        50_000: 1.415e-4,
        100_000: 1.163e-4,
        150_000: 8.111e-5,
        200_000: 4.564e-5,
        250_000: 1.956e-5,
    },
    "linear": {50_000: 1.2785e-4, 150_000: 8.0707e-5, 250_000: 3.3569e-5},
}


@pytest.mark.parametrize("decay", GOLDEN)
def test_golden_values(decay: Decay) -> None:
    """A linear warm-up, the published fall, and the floor at the end and after it."""
    train = TrainConfig(decay=decay)
    ends = {1: 1.5e-4 / 3000, 1500: 0.75e-4, 3000: 1.5e-4, 300_000: 1e-5, 400_000: 1e-5}
    for step, expected in ends.items():
        assert learning_rate(train, step) == pytest.approx(expected), step
    for step, expected in GOLDEN[decay].items():
        assert learning_rate(train, step) == pytest.approx(expected, rel=5e-4), step


def test_without_warm_up_the_first_step_is_almost_at_the_peak() -> None:
    assert learning_rate(TrainConfig(warmup_iterations=0), 1) == pytest.approx(1.5e-4, rel=1e-6)


@given(
    decay=st.sampled_from(list(GOLDEN)),
    iterations=st.integers(2, 1000),
    warmup_share=st.floats(0, 0.49),
    peak=st.floats(1e-6, 1.0),
    floor_share=st.floats(0, 1),
    data=st.data(),
)
def test_after_warm_up_it_falls_and_never_below_the_floor(
    decay: Decay,
    iterations: int,
    warmup_share: float,
    peak: float,
    floor_share: float,
    data: st.DataObject,
) -> None:
    floor, warmup = peak * floor_share, int(iterations * warmup_share)
    train = TrainConfig(
        iterations=iterations,
        warmup_iterations=warmup,
        learning_rate=peak,
        min_learning_rate=floor,
        decay=decay,
    )
    step = data.draw(st.integers(warmup + 1, 2 * iterations))
    rate, following = learning_rate(train, step), learning_rate(train, step + 1)
    assert floor * (1 - 1e-9) <= following <= rate * (1 + 1e-9) <= peak * (1 + 1e-8)


def test_a_constant_rate_warms_up_and_stays() -> None:
    train = TrainConfig(iterations=40, warmup_iterations=4, learning_rate=0.3, decay="constant")
    assert [learning_rate(train, step) for step in (1, 2, 4, 5, 40, 99)] == [
        0.075,
        0.15,
        0.3,
        0.3,
        0.3,
        0.3,
    ]


def test_the_fall_ends_at_its_own_iteration() -> None:
    """As `--lr-decay-iters` apart from `--train-iters`: the rates of a run that ends there, then
    the last of them."""
    for decay in GOLDEN:
        recipe = {
            "decay": decay,
            "warmup_iterations": 5,
            "learning_rate": 1e-3,
            "min_learning_rate": 1e-4,
        }
        whole, short, long = (
            TrainConfig(iterations=n, decay_iterations=end, **recipe)
            for n, end in ((40, None), (20, 40), (80, 40))
        )
        for step in range(1, 41):
            assert (
                learning_rate(whole, step)
                == learning_rate(short, step)
                == learning_rate(long, step)
            )
        assert learning_rate(long, 60) == learning_rate(whole, 40)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"learning_rate": 5e-6},
            "the floor of the schedule, is above its peak, learning_rate = 5e-06",
        ),
        (
            {"iterations": 10, "warmup_iterations": 8},
            "would fall by over a quarter at once: make it at most 5",
        ),
        (
            {
                "iterations": 100,
                "warmup_iterations": 70,
                "decay_iterations": 200,
                "decay": "cosine",
            },
            None,
        ),
        (
            {"iterations": 300, "decay_iterations": 60, "warmup_iterations": 60},
            "must be below decay_iterations = 60",
        ),
        ({"iterations": 9, "warmup_iterations": 9}, "must be below iterations = 9"),
        ({"learning_rate": 5e-6, "decay": "constant"}, None),
    ],
)
def test_a_schedule_that_nobody_means_is_refused(
    changed: dict[str, Any], words: str | None
) -> None:
    if words is None:
        TrainConfig.model_validate(changed)
        return
    with pytest.raises(ValidationError, match=re.escape(words)):
        TrainConfig.model_validate(changed)


def test_a_warm_up_that_is_not_named_is_a_hundredth_of_the_schedule() -> None:
    named = {6: 1, 100: 1, 12_345: 124, 300_000: 3000, 900_000: 3000}
    for iterations, warmup in named.items():
        assert TrainConfig(iterations=iterations).warmup_iterations == warmup
    assert TrainConfig(iterations=300, decay_iterations=200).warmup_iterations == 2
    assert TrainConfig(iterations=6, warmup_iterations=2).warmup_iterations == 2
    assert TrainConfig().warmup_iterations == 3000
    shown = read_run("355m", ["train.iterations=6"]).describe()
    assert "0.00015 after 1 iterations of warm-up, then clipped-cosine to 1e-05 at 6" in shown


@pytest.mark.parametrize(
    ("stated", "counted"),
    [
        (
            {"iterations": "300e9 tokens", "global_batch_size": 1536},
            {"iterations": 190_734},
        ),  # 300e9 / 1536 / 1024
        (
            {"iterations": "999 samples", "warmup_iterations": "100 samples"},
            {"iterations": 124, "warmup_iterations": 12},
        ),
        (
            {
                "iterations": "4096 samples",
                "clock": "samples",
                "warmup_iterations": "100 samples",
                "decay_iterations": "4_000 samples",
            },
            {"iterations": 512, "warmup_iterations": 12.5, "decay_iterations": 500},
        ),
        # four iterations of 4 samples and ten of 8 are 96; one more would be 104
        (
            {"iterations": "100 samples", "rampup_batch_size": [4, 4, 16], "microbatch_size": 4},
            {"iterations": 14},
        ),
        (
            {
                "iterations": 500,
                "validation_interval": "81920 tokens",
                "checkpoint_interval": "3 samples",
            },
            {"validation_interval": 10, "checkpoint_interval": 1},
        ),
    ],
)
def test_lengths_may_be_stated_in_samples_or_tokens(
    stated: dict[str, Any], counted: dict[str, Any]
) -> None:
    model = {"num_layers": 1, "hidden_size": 8, "num_heads": 1}
    train = {"global_batch_size": 8, "microbatch_size": 8} | stated
    config = RunConfig.model_validate({"name": "x", "model": model, "train": train})
    assert {key: getattr(config.train, key) for key in counted} == counted
    with pytest.raises(ValidationError, match="iterations"):
        RunConfig.model_validate(
            {"name": "x", "model": model, "train": train | {"iterations": "7 days"}}
        )


@pytest.mark.parametrize(
    ("model", "length", "said"),
    [
        ({"seq_length": "abc"}, "1e6 tokens", "model.seq_length: 'abc' should be a valid integer"),
        ({"seq_length": 0}, "1e6 tokens", "model.seq_length: 0 "),
        ({"seq_length": "512"}, "1e400 tokens", "train.iterations = '1e400 tokens' is more than"),
        ({}, "1e30 samples", "train.iterations = '1e30 samples' is more than 9.0072e+15 samples"),
    ],
)
def test_a_length_that_cannot_be_counted_is_refused(
    model: dict[str, Any], length: str, said: str
) -> None:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "vocab_size": 9}
    values = {"name": "x", "model": sizes | model, "train": {"iterations": length}}
    with pytest.raises(BadInput, match=re.escape(said)):
        parse_config(values, RunConfig, "file")


def test_a_sequence_s_length_may_still_be_a_text() -> None:
    """As `--set model.seq_length=512` gives it."""
    sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "seq_length": "512"}
    train = {"iterations": "40960 tokens", "global_batch_size": 8, "microbatch_size": 8}
    config = RunConfig.model_validate({"name": "x", "model": sizes, "train": train})
    assert config.train.iterations == 10
