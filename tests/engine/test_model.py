"""The model is GPT-2: equal to an independent implementation, forward and through one optimizer
step."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from mlm_repro.engine.config import ModelConfig, TrainConfig
from mlm_repro.engine.formats.huggingface import named_as_theirs
from mlm_repro.engine.model.gpt2 import GPT2
from mlm_repro.engine.model.microbatch import PipelineInput
from mlm_repro.engine.optim.adam import FlatAdamW
from mlm_repro.engine.optim.gradients import GradientReducer
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.engine.parallel.sharding import sharded_parameters

CONFIG = ModelConfig(
    num_layers=3, hidden_size=24, num_heads=4, seq_length=16, vocab_size=50, padded_vocab_size=64
)
TOKENS = torch.randint(
    0, CONFIG.vocab_size, (4, CONFIG.seq_length + 1), generator=torch.Generator().manual_seed(1)
)


def build(dtype: torch.dtype = torch.float32, config: ModelConfig = CONFIG) -> GPT2:
    model = GPT2(config, serial_mesh()).to(dtype)
    model.initialize(7)
    return model


def roughen(model: GPT2) -> GPT2:
    """Large random values everywhere, so that no bias, layer norm or residual is invisible."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty(parameter.shape).normal_(0.0, 0.2, generator=generator))
    return model


def other_library(model: GPT2) -> GPT2LMHeadModel:
    """Hugging Face's GPT-2 with the same weights and no dropout."""
    c = model.config
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=c.vocab_size,
            n_positions=c.seq_length,
            n_embd=c.hidden_size,
            n_layer=c.num_layers,
            n_head=c.num_heads,
            **dropout,
        )
    ).to(next(model.parameters()).dtype)
    values = named_as_theirs(model.state_dict(), c)
    theirs.load_state_dict(values | {"lm_head.weight": values["transformer.wte.weight"]})
    return theirs.train()


def loss_of(model: GPT2, tokens: torch.Tensor) -> torch.Tensor:
    return model.batch_loss(model(tokens[:, :-1]), PipelineInput(tokens[:, :-1], tokens[:, 1:]))


def their_loss(model: GPT2LMHeadModel, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def test_logits_and_loss_equal_the_other_library() -> None:
    ours = roughen(build())
    theirs = other_library(ours)
    with torch.no_grad():
        logits = ours.logits(ours(TOKENS[:, :-1])).transpose(0, 1)
        assert logits.shape == (4, CONFIG.seq_length, CONFIG.padded_vocab_size)
        expected = theirs(TOKENS[:, :-1]).logits
        torch.testing.assert_close(logits[..., : CONFIG.vocab_size], expected, rtol=1e-5, atol=1e-5)
        loss = loss_of(ours, TOKENS)
        torch.testing.assert_close(loss, their_loss(theirs, TOKENS), rtol=0, atol=1e-5)


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_an_optimizer_step_equals_the_other_library(clip: float) -> None:
    train = TrainConfig(weight_decay=0.1, clip_gradient=clip, learning_rate=1e-2)
    ours = roughen(build(torch.float64))
    theirs = other_library(ours)
    optimizer = FlatAdamW(sharded_parameters(ours, ours.mesh), train, ours.mesh)
    undecayed = [
        p for name, p in theirs.named_parameters() if name.endswith("bias") or ".ln_" in name
    ]
    decayed = [
        p for name, p in theirs.named_parameters() if not (name.endswith("bias") or ".ln_" in name)
    ]
    reducer = GradientReducer(optimizer.groups, ours.mesh)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": undecayed, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
    for rate in (1e-2, 4e-3):
        reducer.begin()
        for row in TOKENS.split(2):
            loss_of(ours, row).backward()
        reducer.finish(2)
        norm = optimizer.gradient_norm()
        optimizer.step(rate, norm)
        reference.zero_grad()
        their_loss(theirs, TOKENS).backward()
        their_norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip or math.inf)
        assert norm == pytest.approx(their_norm.item(), rel=1e-9)
        assert norm > clip
        for settings in reference.param_groups:
            settings["lr"] = rate
        reference.step()
    expected = theirs.state_dict()
    for name, value in other_library(ours).state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-8, msg=name)


def test_padding_rows_take_no_part() -> None:
    model = roughen(build(torch.float64))
    word = model.embedding.word_embeddings.weight
    before = loss_of(model, TOKENS)
    before.backward()
    assert word.grad is not None
    assert word.grad[CONFIG.vocab_size :].abs().max() == 0
    assert word.grad[: CONFIG.vocab_size].abs().sum(dim=1).min() > 0
    with torch.no_grad():
        word[CONFIG.vocab_size :] = 1e3
    assert loss_of(model, TOKENS).item() == before.item()


def test_initial_values() -> None:
    config = ModelConfig(
        num_layers=8,
        hidden_size=128,
        num_heads=4,
        seq_length=256,
        vocab_size=1000,
        padded_vocab_size=1024,
    )
    model = build(config=config)
    for name, value in model.state_dict().items():
        if name.endswith("bias"):
            assert value.abs().max() == 0, name
        elif "layernorm" in name:
            assert torch.equal(value, torch.ones_like(value)), name
        else:
            residual = name.endswith(("self_attention.dense.weight", "mlp.dense_4h_to_h.weight"))
            std = 0.02 / math.sqrt(2 * 8) if residual else 0.02
            error = 5 / math.sqrt(value.numel())
            assert value.std().item() == pytest.approx(std, rel=error), name
            assert abs(value.mean().item()) < std * error, name
            assert value.abs().max() > 3 * std, name


def test_initial_values_depend_on_seed_and_name_only() -> None:
    three, two = (
        build().state_dict(),
        build(config=CONFIG.model_copy(update={"num_layers": 2})).state_dict(),
    )
    for name, value in two.items():
        if not name.endswith(("self_attention.dense.weight", "mlp.dense_4h_to_h.weight")):
            assert torch.equal(value, three[name]), name
    first, second = (three[f"layers.{i}.mlp.dense_h_to_4h.weight"] for i in (0, 1))
    assert (first - second).abs().mean() > 0.01
    other = GPT2(CONFIG, serial_mesh())
    other.initialize(8)
    assert (other.state_dict()["layers.0.mlp.dense_h_to_4h.weight"] - first).abs().mean() > 0.01
