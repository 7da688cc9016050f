"""Transformer-XL against the published formulas, its memory in every layout and over a stop, its
order of text."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mlm_repro.data_pipeline.tokens.token_file import TokenFile
from mlm_repro.engine.checkpoint.stream_memory import StreamMemory
from mlm_repro.engine.config import ModelConfig, RunConfig, TrainConfig
from mlm_repro.engine.data.dataset import DatasetFacts
from mlm_repro.engine.families.transformer_xl import training_streams, validation_streams
from mlm_repro.engine.families.transformer_xl.model import AdaptiveEmbedding, TransformerXL
from mlm_repro.engine.launch.mesh import build_mesh
from mlm_repro.engine.launch.threads import run_threads
from mlm_repro.engine.model.microbatch import PipelineInput, Recurrence
from mlm_repro.engine.parallel.layout import Layout, layout_of
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.engine.run.files import read_metrics
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from mlm_repro.verify.runner import run_parity
from tests.engine.small_run import assert_same_training, in_two_sessions, small_config, train

XL: dict[str, Any] = {"memory_length": 12, "head_dim": 6, "inner_size": 20}
SHAPE: dict[str, Any] = {
    "family": "transformer-xl",
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "seq_length": 8,
    "vocab_size": 29,
    "padded_vocab_size": 32,
    "init_std": 0.3,
}
MODEL = ModelConfig(**SHAPE, transformer_xl=XL)
Array = np.ndarray[Any, np.dtype[np.float64]]


def build(config: ModelConfig = MODEL) -> TransformerXL:
    model = TransformerXL(config, serial_mesh()).double()
    model.initialize(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias") or "layernorm" in name:
                parameter.add_(
                    0.1
                    * torch.randn(
                        parameter.shape, generator=torch.Generator().manual_seed(len(name))
                    )
                )
    return model


def segments(rows: int, count: int, length: int, seed: int = 0) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, MODEL.vocab_size, (rows, length), generator=random) for _ in range(count)
    ]


def layer_norm(x: Array, weight: Array, bias: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


def published_forward(
    model: TransformerXL, text: Array, memories: list[Array]
) -> tuple[Array, list[Array]]:
    """Dai et al. 2019, Section 3.3, pair by pair: logits of one row's segment and the inputs of
    every layer."""
    p = {name: value.detach().numpy() for name, value in model.named_parameters()}
    n, d, width = model.config.num_heads, model.config.head_dim, model.config.hidden_size
    x = p["embedding.word_embeddings.weight"][text] * math.sqrt(width)
    inputs = []
    for layer in range(model.config.num_layers):
        at = f"layers.{layer}."
        inputs.append(x)
        extended = np.concatenate([memories[layer], x])  # h̃
        by_head = p[at + "self_attention.query_key_value.weight"].reshape(n, 3, d, width)
        u, v = p[at + "self_attention.content_bias"], p[at + "self_attention.position_bias"]
        from_distance = p[at + "self_attention.distance.weight"].reshape(n, d, width)  # W_{k,R}
        heads = np.zeros((len(x), n, d))
        for head in range(n):
            w_q, w_k, w_v = by_head[head]
            for i in range(len(x)):
                now = len(memories[layer]) + i
                q = w_q @ x[i]
                scores = np.zeros(now + 1)
                for j in range(now + 1):
                    angles = (now - j) / 10000.0 ** (np.arange(0, width, 2) / width)
                    r = from_distance[head] @ np.concatenate([np.sin(angles), np.cos(angles)])
                    k = w_k @ extended[j]
                    # The terms (a), (b), (c), (d).
                    scores[j] = q @ k + q @ r + u[head] @ k + v[head] @ r
                weights = np.exp(scores / math.sqrt(d))
                heads[i, head] = weights / weights.sum() @ (extended[: now + 1] @ w_v.T)
        attention = heads.reshape(len(x), n * d) @ p[at + "self_attention.dense.weight"].T
        x = layer_norm(
            x + attention, p[at + "attention_layernorm.weight"], p[at + "attention_layernorm.bias"]
        )
        inner = np.maximum(
            x @ p[at + "dense_h_to_inner.weight"].T + p[at + "dense_h_to_inner.bias"], 0
        )
        mlp = inner @ p[at + "dense_inner_to_h.weight"].T + p[at + "dense_inner_to_h.bias"]
        x = layer_norm(x + mlp, p[at + "mlp_layernorm.weight"], p[at + "mlp_layernorm.bias"])
    return x @ p["embedding.word_embeddings.weight"].T, inputs


@pytest.mark.parametrize("memory_length", [0, 3, 12, 40])
def test_logits_of_segments_with_memory_equal_the_published_formulas(memory_length: int) -> None:
    model = build(ModelConfig(**SHAPE, transformer_xl=XL | {"memory_length": memory_length}))
    recurrence = Recurrence()
    memories = [[np.zeros((0, 16))] * 2 for _ in range(3)]
    for tokens in segments(rows=3, count=3, length=5):
        hidden = model.run_stage(tokens, PipelineInput(tokens, tokens, None, recurrence))
        ours = model.logits(hidden).detach().numpy()
        for row in range(3):
            expected, inputs = published_forward(model, tokens[row].numpy(), memories[row])
            np.testing.assert_allclose(ours[:, row], expected, rtol=0, atol=1e-11)
            joined = [np.concatenate(pair) for pair in zip(memories[row], inputs, strict=True)]
            memories[row] = [states[max(len(states) - memory_length, 0) :] for states in joined]
        recurrence = Recurrence(recurrence.after)


def test_no_gradient_flows_into_memory() -> None:
    model = build()
    (first,) = segments(rows=2, count=1, length=8)
    states = Recurrence()
    model.run_stage(first, PipelineInput(first, first, None, states))
    assert all(not memory.requires_grad for memory in states.after.values())


@pytest.mark.parametrize("div_value", [1, 2])
def test_adaptive_softmax_is_a_distribution_and_its_losses_are_its_logarithms(
    div_value: int,
) -> None:
    config = ModelConfig(**SHAPE, transformer_xl=XL | {"cutoffs": (5, 11), "div_value": div_value})
    embedding = AdaptiveEmbedding(config).double()
    for parameter in embedding.parameters():
        nn.init.normal_(parameter)
    hidden, targets = torch.randn(50, 16, dtype=torch.float64), torch.randint(0, 29, (50,))
    logarithms = embedding.logits(hidden)
    torch.testing.assert_close(logarithms.exp().sum(-1), torch.ones(50, dtype=torch.float64))
    expected = -logarithms.gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(embedding.losses(hidden, targets), expected)
    words = [table.detach() for table in embedding.words]
    projected = torch.cat(
        [words[0], *(w @ q.T for w, q in zip(words[1:], embedding.projections, strict=True))]
    )
    torch.testing.assert_close(embedding(targets.view(5, 10)), projected[targets.view(5, 10).T])


def test_divided_it_trains_like_the_serial_run() -> None:
    recipe = TrainConfig(
        iterations=4,
        global_batch_size=4,
        microbatch_size=1,
        learning_rate=1e-2,
        warmup_iterations=1,
    )
    config = RunConfig(name="xl", model=MODEL, train=recipe)
    # Raises with the first tensor that differs.
    run_parity(config, "tp2-pp2-dp2-zero1-recompute", 8, 3)


@pytest.mark.parametrize(
    ("model", "parallel", "sentence"),
    [
        ({}, {"tp": 2, "sequence_parallel": True}, "does not divide its sequence"),
        ({"cutoffs": (5, 11)}, {"tp": 2}, "has an adaptive embedding, which is not divided"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    model: dict[str, Any], parallel: dict[str, Any], sentence: str
) -> None:
    config = ModelConfig(**SHAPE, transformer_xl=XL | model)
    with pytest.raises(BadInput, match=sentence):
        layout_of(RunConfig(name="xl", model=config, parallel=parallel), 2)  # type: ignore[arg-type]


@given(iterations=st.integers(1, 30), batch=st.sampled_from([1, 2, 4]), seed=st.integers(0, 5))
@settings(max_examples=10)
def test_each_place_reads_on_where_it_stopped(
    dataset: Path, iterations: int, batch: int, seed: int
) -> None:
    model = ModelConfig(**SHAPE | {"seq_length": 32})
    train = TrainConfig(global_batch_size=2 * batch, microbatch_size=batch, seed=seed)
    config = RunConfig(name="xl", model=model, train=train)
    streams = training_streams(
        config, DatasetFacts.read(dataset).token_files("train"), iterations, None
    )
    read: dict[int, list[np.ndarray[Any, Any]]] = {place: [] for place in range(2 * batch)}
    for iteration in range(iterations):
        for rank in range(2):
            for microbatch in streams.microbatches(iteration, rank, 2):
                for place, tokens in zip(microbatch.places, microbatch.tokens, strict=True):
                    read[place].append(tokens)
    for rows in read.values():
        assert all((before[-1] == after[0]) for before, after in pairwise(rows))
    flat = np.concatenate([row[:-1] for rows in read.values() for row in rows])
    packed = streams.take(range(2 * batch * iterations), ()).tokens[:, :-1].flatten()
    np.testing.assert_array_equal(flat, packed)  # nothing twice, nothing left out


def test_validation_streams_cover_the_split_in_order(dataset: Path) -> None:
    file = TokenFile(dataset / "valid_text_document")
    train = TrainConfig(global_batch_size=4, microbatch_size=2)
    config = RunConfig(name="xl", model=ModelConfig(**SHAPE | {"seq_length": 16}), train=train)
    streams = validation_streams(config, [(file, 1.0)], dataset)
    rows: dict[int, list[int]] = {place: [] for place in range(4)}
    for rank in range(2):
        for microbatch in streams.microbatches(10**9, 8, rank, 2):
            for place, tokens in zip(microbatch.places, microbatch.tokens, strict=True):
                rows[place] += tokens[:-1].tolist()
    expected = file.tokens[: streams.num_samples * 16]
    np.testing.assert_array_equal(np.concatenate([rows[place] for place in range(4)]), expected)
    short = ModelConfig(**SHAPE | {"seq_length": len(file.tokens) // 3})
    with pytest.raises(BadInput, match="a transformer-xl needs 4 × "):
        validation_streams(config.model_copy(update={"model": short}), [(file, 1.0)], dataset)


def small_xl(dataset: Path, memory_length: int = 32, **changed: Any) -> RunConfig:
    model = {"family": "transformer-xl", "transformer_xl": {"memory_length": memory_length}}
    return small_config(dataset, model, **({"iterations": 12, "keep_checkpoints": 1} | changed))


def test_a_stopped_run_goes_on_bit_for_bit(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_xl(dataset, precision="bf16", validation_interval=6)
    expected = train(config, tmp_path / "whole").path
    assert_same_training(in_two_sessions(config, tmp_path / "halves", 5, monkeypatch), expected)
    losses = [line["loss"] for line in read_metrics(expected) if line["kind"] == "validation"]
    assert losses[-1] < losses[0] - 0.5
    alone = train(small_xl(dataset, memory_length=0, precision="bf16"), tmp_path / "alone").path
    first, second = (
        [line["loss"] for line in read_metrics(run) if line["kind"] == "train"][:2]
        for run in (expected, alone)
    )
    assert first[0] == second[0]
    assert first[1] != second[1]  # the second segment has a memory


def save_on_two_ranks(folder: Path) -> None:
    mesh = build_mesh(Layout(dp=2))
    memory = StreamMemory(MODEL, mesh)
    for places in ((mesh.dp.rank,), (2 + mesh.dp.rank,)):
        recurrence = memory.enter(places)
        assert recurrence is not None
        recurrence.after.update(
            {layer: torch.full((3, 1, 16), 10.0 * layer + places[0]) for layer in range(2)}
        )
    memory.commit()
    memory.save(folder, memory.states())


def test_memory_goes_on_in_another_layout(tmp_path: Path) -> None:
    run_threads(save_on_two_ranks, 2, tmp_path)
    memory = StreamMemory(MODEL, serial_mesh())
    memory.load(tmp_path, [(0, 1, 2, 3)], range(2))
    recurrence = memory.enter((0, 1, 2, 3))
    assert recurrence is not None
    for layer in range(2):
        expected = (10.0 * layer + torch.arange(4.0)).view(1, 4, 1).expand(3, 4, 16)
        assert torch.equal(recurrence.before[layer], expected)
    with pytest.raises(IntegrityFailure, match="lack 2 of the states"):
        memory.load(tmp_path, [(4,)], range(2))
