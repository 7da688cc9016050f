"""The twin rule: what it divides, what it leaves alone, and that a configuration cannot misstate
it."""

from pathlib import Path

import pytest

from mlm_repro import experiments
from mlm_repro.engine.config import RunConfig, TwinScale
from mlm_repro.engine.run.resolved import read_run_config
from mlm_repro.engine.twin import describe_scale, shrink
from mlm_repro.lineage.errors import BadInput

MODELS = sorted((Path(experiments.__file__).parent / "models").glob("*.toml"))
SCALE = TwinScale()


@pytest.fixture(params=MODELS, ids=lambda path: path.stem)
def full_size(request: pytest.FixtureRequest) -> RunConfig:
    return read_run_config(request.param)


def test_the_model_is_divided_by_the_factors(full_size: RunConfig) -> None:
    model, small = full_size.model, shrink(full_size).model
    assert small.num_layers == model.num_layers // SCALE.num_layers
    for what in ("hidden_size", "num_heads", "seq_length", "padded_vocab_size"):
        factor = SCALE.vocab_size if what == "padded_vocab_size" else getattr(SCALE, what)
        assert getattr(small, what) * factor == getattr(model, what), what
    assert small.head_dim * SCALE.hidden_size == model.head_dim * SCALE.num_heads
    assert small.inner_size * SCALE.hidden_size == model.inner_size
    assert (
        small.transformer_xl.memory_length * SCALE.seq_length == model.transformer_xl.memory_length
    )
    assert small.dropout == model.dropout
    assert small.init_std == model.init_std


def test_the_recipe_is_divided_by_the_factors(full_size: RunConfig) -> None:
    train, small = full_size.train, shrink(full_size).train
    assert small.global_batch_size == train.global_batch_size // SCALE.global_batch_size
    assert small.iterations == train.iterations // SCALE.iterations
    assert small.warmup_iterations * SCALE.warmup_iterations == train.warmup_iterations
    assert small.learning_rate == pytest.approx(train.learning_rate * SCALE.learning_rate)
    assert small.min_learning_rate == pytest.approx(train.min_learning_rate * SCALE.learning_rate)
    for same in (
        "weight_decay",
        "clip_gradient",
        "decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "seed",
    ):
        assert getattr(small, same) == getattr(train, same), same


def test_a_twin_says_so(full_size: RunConfig) -> None:
    twin = shrink(full_size)
    assert twin.twin == SCALE
    assert twin.name == f"{full_size.name}-twin"
    for factor in SCALE.model_dump().values():
        assert f" {factor}" in describe_scale(SCALE)


def test_a_recipe_is_shrunk_by_the_factors_that_are_named() -> None:
    twin = read_run_config(
        MODELS[0], ["train.weight_decay=0.5", "twin.hidden_size=8", "twin.num_heads=2"], twin=True
    )
    assert twin.twin == TwinScale(hidden_size=8, num_heads=2)
    assert twin.model.hidden_size * 8 == read_run_config(MODELS[0]).model.hidden_size
    assert twin.train.weight_decay == 0.5
    for wrong, words in (
        ("twin.hidden_size=0", "hidden_size"),
        ("twin.width=8", "width"),
        ("twin=8", "twin"),
    ):
        with pytest.raises(BadInput, match=words):
            read_run_config(MODELS[0], [wrong], twin=True)
