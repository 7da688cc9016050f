"""Closed forms against the published tables and against a real model."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from mlm_repro import experiments
from mlm_repro.engine.config import ModelConfig, ParallelConfig, Precision, TrainConfig
from mlm_repro.engine.costs import (
    RankMemory,
    activation_bytes_per_layer,
    checkpoint_bytes,
    fullest_rank,
    memory_of_ranks,
    parameter_count,
    state_bytes_per_parameter,
)
from mlm_repro.engine.family import family_of
from mlm_repro.engine.model.gpt2 import GPT2
from mlm_repro.engine.parallel.layout import split_layers
from mlm_repro.engine.parallel.mesh import LoneAxis, serial_mesh
from mlm_repro.engine.run.resolved import read_run_config
from tests.engine.small_run import MODEL

MODELS = Path(experiments.__file__).parent / "models"
PARAMETERS = {
    "gpt2-124m": 0.1245,
    "355m": 0.3558,
    "1.2b": 1.2135,
    "2.5b": 2.4904,
    "4.2b": 4.1991,
    "8.3b": 8.3170,
}
"""Billions, at 51,200 rows of vocabulary, nanoGPT's at 50,304; Table 1 of the 2019 paper rounds
them."""


def published(name: str) -> ModelConfig:
    return read_run_config(MODELS / f"{name}.toml").model


def test_every_shipped_gpt2_has_a_known_size() -> None:
    shipped = {path.stem for path in MODELS.glob("*.toml")}
    assert {name for name in shipped if published(name).family == "gpt2"} == PARAMETERS.keys()


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_the_published_models(name: str) -> None:
    assert parameter_count(published(name)) == pytest.approx(1e9 * PARAMETERS[name], abs=0.5e5)


@pytest.mark.parametrize(
    "config", [ModelConfig(**MODEL), *map(published, PARAMETERS)], ids=["small", *PARAMETERS]
)
def test_the_count_is_that_of_the_model(config: ModelConfig) -> None:
    with torch.device("meta"):
        model = GPT2(config, serial_mesh("meta"))
    assert parameter_count(config) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", get_args(ModelConfig.model_fields["family"].annotation))
def test_the_count_of_a_stage_is_that_of_its_ranks(family: str, tp: int) -> None:
    model = ModelConfig.model_validate(
        MODEL | {"family": family, "vocab_size": 250, "padded_vocab_size": 256}
    )
    mesh = replace(serial_mesh("meta"), tp=LoneAxis(tp), pp=LoneAxis(2))
    for stage in split_layers(model.num_layers, 2, 1):
        with torch.device("meta"):
            held = family_of(model).model_class()(model, mesh, stage)
        assert family_of(model).closed_forms(model).parameters(stage, tp) == sum(
            parameter.numel() for parameter in held.parameters()
        )


@pytest.mark.parametrize(
    ("precision", "state", "saved"),
    [("fp64", 32, 24), ("fp32", 16, 12), ("fp16", 18, 14), ("fp16-pure", 8, 6)],
)
def test_bytes_per_parameter(precision: Precision, state: int, saved: int) -> None:
    model = ModelConfig(**MODEL)
    assert state_bytes_per_parameter(precision, ParallelConfig()) == state
    assert checkpoint_bytes(model, precision) == saved * parameter_count(model)


def test_parallelism_divides_memory() -> None:
    model, train = published("8.3b"), TrainConfig(precision="fp16")

    def memory(**parallel: Any) -> RankMemory:
        return fullest_rank(model, train, ParallelConfig(**parallel))

    whole, eighth = memory(), memory(tp=8)
    assert whole.state == pytest.approx(18 * parameter_count(model), rel=1e-3)
    assert whole.state / 8 < eighth.state < whole.state / 7
    assert whole.activations / 8 < eighth.activations < whole.activations / 3
    assert memory(pp=8).state < whole.state / 7
    # Eight microbatches in flight on an eighth.
    assert memory(pp=8).activations > 0.9 * whole.activations
    assert memory(pp=8, schedule="gpipe").activations > 7 * memory(pp=8).activations


def test_memory_by_hand() -> None:
    """One layer a rank: state, activations of the microbatches in flight, one layer recomputed,
    head and logits."""
    model = ModelConfig(
        num_layers=4,
        hidden_size=256,
        num_heads=4,
        seq_length=128,
        vocab_size=1024,
        padded_vocab_size=1024,
    )
    train = TrainConfig(global_batch_size=32, microbatch_size=2, precision="fp16")
    ranks = memory_of_ranks(model, train, ParallelConfig(pp=4, recompute="full"))
    sbh = 128 * 2 * 256
    layer, words = 12 * 256**2 + 13 * 256, 1024 * 256
    again = sbh * (34 + 5 * 4 * 128 / 256 - 2)
    head = 2 * 2 * sbh + 4 * 2 * 128 * 1024
    assert [one.state for one in ranks] == [
        18 * (layer + words + 128 * 256),
        18 * layer,
        18 * layer,
        18 * (layer + words + 2 * 256),
    ]
    assert [one.activations for one in ranks] == [
        8 * sbh + again,
        6 * sbh + again,
        4 * sbh + again,
        2 * sbh + again + head,
    ]
    assert fullest_rank(model, train, ParallelConfig(pp=4, recompute="full")) == ranks[3]


def test_sequence_parallelism_divides_what_tensor_parallelism_leaves_whole() -> None:
    """Korthikanti et al. 2022, Table 2: sbh(34 + 5as/h)/t, and with full recomputation 2sbh/t."""
    model = published("8.3b")
    for recompute in ("none", "full"):
        serial, divided = (
            activation_bytes_per_layer(
                model, 8, ParallelConfig(recompute=recompute, tp=tp, sequence_parallel=True)
            )
            for tp in (1, 4)
        )
        assert divided == pytest.approx(serial / 4)


def test_recomputation_lowers_activations() -> None:
    """Korthikanti et al. 2022: per layer 34 + 5as/h without, 34 with selective, 2 with full
    recomputation, × sbh."""
    model = published("8.3b")
    unit = model.seq_length * 8 * model.hidden_size
    attention = 5 * model.num_heads * model.seq_length / model.hidden_size
    for recompute, expected in (("none", 34 + attention), ("selective", 34), ("full", 2)):
        found = activation_bytes_per_layer(model, 8, ParallelConfig(recompute=recompute))
        assert found / unit == pytest.approx(expected)
