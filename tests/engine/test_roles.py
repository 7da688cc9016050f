"""A parameter's role gives its initial value and decay: those that names gave to every family
before roles."""

import csv
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from mlm_repro.engine.config import ModelConfig, TrainConfig
from mlm_repro.engine.family import family_of
from mlm_repro.engine.finetune.train import FineTuneModel
from mlm_repro.engine.model import stage_model
from mlm_repro.engine.model.gpt2 import GPT2
from mlm_repro.engine.model.stage_model import StageModel
from mlm_repro.engine.optim.adam import FlatAdamW
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.engine.parallel.sharding import Role, sharded_parameters

RECORDED = Path(__file__).with_name("initial_values.csv")
"""Weight decay and initial value of each parameter, written by the last version that read them from
names."""
SIZES = {
    "num_layers": 3,
    "hidden_size": 24,
    "num_heads": 4,
    "seq_length": 16,
    "vocab_size": 50,
    "padded_vocab_size": 64,
}
OF_FAMILY = {
    "gpt2": {},
    "bert": {"family": "bert"},
    "transformer-xl": {"family": "transformer-xl", "transformer_xl": {"memory_length": 8}},
    "adaptive": {
        "family": "transformer-xl",
        "transformer_xl": {"cutoffs": (5, 11), "div_value": 2},
    },
}


def build(name: str) -> StageModel:
    """A model without initial values."""
    config = ModelConfig.model_validate({**SIZES, **OF_FAMILY[name]})
    model = family_of(config).model_class()(config, serial_mesh())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    return model


def decays(model: nn.Module) -> dict[str, float]:
    optimizer = FlatAdamW(sharded_parameters(model, serial_mesh()), TrainConfig(), serial_mesh())
    return {
        parameter.name: group.weight_decay
        for group in optimizer.groups
        for parameter in group.parameters
    }


def rows(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, ...]]:
    """What is recorded of a model: deviations as they are given to the generator, whose values
    processors round."""
    drawn, draw = dict[str, float](), stage_model.initial_normal

    def listen(seed: int, parameter: str, shape: tuple[int, ...], std: float) -> torch.Tensor:
        drawn[parameter] = std
        return draw(seed, parameter, shape, std)

    monkeypatch.setattr(stage_model, "initial_normal", listen)
    model = build(name)
    model.initialize(7)
    values = {
        each.name: each.local.detach().clone() for each in sharded_parameters(model, model.mesh)
    }
    for parameter, decay in decays(model).items():
        (*others, first) = values[parameter].unique().tolist()
        begins = f"deviation {drawn[parameter]!r}" if parameter in drawn else repr(first)
        assert bool(others) == (parameter in drawn)
        yield name, re.sub(r"layers\.\d+", "layers.*", parameter), repr(decay), begins


@pytest.mark.parametrize("name", OF_FAMILY)
def test_initial_values_and_decay_are_those_that_names_gave(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RECORDED.open(encoding="utf-8", newline="") as file:
        _, *recorded = map(tuple, csv.reader(file))
    found = {*rows(name, monkeypatch)}
    assert found == {row for row in recorded if row[0] == name}
    assert len(found) > 10


def test_a_fine_tuning_head_decays_as_the_body_does() -> None:
    tuned = FineTuneModel(build("bert"), 3, over_positions=False)  # type: ignore[arg-type]
    decayed = decays(tuned)
    assert (decayed["head.weight"], decayed["head.bias"]) == (TrainConfig().weight_decay, 0.0)
    assert {name: decayed[f"body.{name}"] for name in decays(tuned.body)} == decays(tuned.body)


def test_what_a_parameter_is_called_means_nothing() -> None:
    model = GPT2(ModelConfig.model_validate(SIZES), serial_mesh())
    model.last_norm, model.bias = model.final_layernorm, nn.Linear(4, 4)
    del model.final_layernorm
    model.initialize(7)
    assert torch.equal(model.last_norm.weight, torch.ones(24))
    assert model.bias.weight.std() > 0
    of = decays(model)
    assert [of[f"{name}.weight"] for name in ("last_norm", "bias")] == [
        0.0,
        TrainConfig().weight_decay,
    ]


def test_a_parameter_without_a_role_is_named() -> None:
    model = GPT2(ModelConfig.model_validate(SIZES), serial_mesh())
    model.layers["1"].input_layernorm = nn.RMSNorm(24)
    with pytest.raises(
        TypeError,
        match=r"^the role of parameter layers\.1\.input_layernorm\.weight is not declared",
    ):
        model.initialize(7)
    model.layers["1"].input_layernorm = nn.LayerNorm(24)
    model.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(
        TypeError,
        match=r"of parameter scale is not declared: give it in GPT2\.roles, as one of Role\.WEIGHT",
    ):
        sharded_parameters(model, model.mesh)


def test_a_list_of_parameters_has_the_role_that_its_owner_declares() -> None:
    of = {each.name: each.role for each in sharded_parameters(build("adaptive"), serial_mesh())}
    assert [of[f"embedding.{name}"] for name in ("words.2", "projections.1", "clusters")] == [
        Role.EMBEDDING,
        Role.WEIGHT,
        Role.EMBEDDING,
    ]
