"""Any layout trains like the serial run: same losses, gradients and weights."""

from typing import Any

import numpy as np
import pytest
import torch

from engine.config import ModelConfig, TrainConfig
from engine.model.gpt2 import GPT2
from engine.optim.adam import FlatAdamW
from engine.optim.schedule import learning_rate
from engine.parallel.layout import Layout, fit_layout
from engine.parallel.mesh import build_mesh
from engine.parallel.sharding import sharded_parameters
from engine.rng import Dropout
from lineage.errors import BadInput
from tests.ranks import run_ranks

MODEL = ModelConfig(
    num_layers=2, hidden_size=16, num_heads=4, seq_length=8, vocab_size=29, padded_vocab_size=32, dropout=0.1
)
TRAIN = TrainConfig(
    iterations=5, global_batch_size=8, microbatch_size=2, learning_rate=1e-2, warmup_iterations=1, precision="fp64"
)


def train_on(layout: Layout) -> dict[str, Any]:
    """Five iterations in float64 on fixed data; whole weights and gradients from every rank."""
    mesh = build_mesh(layout)
    model = GPT2(MODEL, mesh).double()
    model.initialize(TRAIN.seed)
    parameters = sharded_parameters(model, mesh)
    optimizer = FlatAdamW(parameters, TRAIN, mesh)
    tokens = np.random.RandomState(0).randint(0, MODEL.vocab_size, (TRAIN.iterations, TRAIN.global_batch_size, 9))
    losses, norms = [], []
    micro, dp = TRAIN.microbatch_size, layout.dp
    for iteration in range(TRAIN.iterations):
        optimizer.zero_gradients()
        total = torch.zeros((), dtype=torch.float64)
        for block in range(0, TRAIN.global_batch_size, micro * dp):
            places = tuple(range(block + mesh.dp.rank * micro, block + (mesh.dp.rank + 1) * micro))
            rows = torch.from_numpy(tokens[iteration, list(places)])
            dropout = Dropout(MODEL.dropout, TRAIN.seed, iteration, places)
            loss = model(rows[:, :-1], rows[:, 1:], dropout)
            loss.backward()
            total += loss.detach()
        optimizer.reduce_gradients(TRAIN.global_batch_size // (micro * dp))
        losses.append(mesh.dp.all_reduce(total).item() / (TRAIN.global_batch_size // micro))
        norms.append(optimizer.gradient_norm())
        gradients = {p.name: p.gather(p.local.grad.clone()).numpy() for p in parameters if p.local.grad is not None}
        optimizer.step(learning_rate(TRAIN, iteration + 1), norms[-1])
    weights = {p.name: p.gather(p.local.data).numpy() for p in parameters}
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(tp=2), Layout(tp=4), Layout(tp=2, dp=2)], ids=str)
def test_layout_equals_serial(layout: Layout) -> None:
    serial = run_ranks(train_on, 1, Layout())[0]
    for rank in run_ranks(train_on, layout.world_size, layout):
        np.testing.assert_allclose(rank["losses"], serial["losses"], rtol=0, atol=1e-10)
        np.testing.assert_allclose(rank["norms"], serial["norms"], rtol=0, atol=1e-10)
        for what in ("gradients", "weights"):
            assert rank[what].keys() == serial[what].keys()
            for name, expected in serial[what].items():
                np.testing.assert_allclose(rank[what][name], expected, rtol=0, atol=1e-10, err_msg=f"{what} {name}")


def test_the_first_loss_is_that_of_a_uniform_guess() -> None:
    losses = run_ranks(train_on, 1, Layout())[0]["losses"]
    assert losses[0] == pytest.approx(np.log(MODEL.vocab_size), abs=0.1)


def test_coordinates_and_rank_are_inverse() -> None:
    layout = Layout(tp=2, pp=4, dp=2)
    assert layout.world_size == 16
    assert [layout.coordinates(rank) for rank in range(4)] == [(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1)]
    assert [layout.rank(*layout.coordinates(rank)) for rank in range(16)] == list(range(16))


@pytest.mark.parametrize(
    ("world", "tp", "batch", "sentence"),
    [
        (4, 3, 8, "tp = 3 does not divide the 4 ranks; it can be 1, 2, 4"),
        (8, 8, 8, "tp = 8 does not divide the 4 attention heads; it can be 1, 2, 4"),
        (3, 1, 4, "the global batch of 4 microbatches does not divide over 3 data-parallel ranks"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused(world: int, tp: int, batch: int, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        fit_layout(world, tp, num_heads=4, padded_vocab_size=32, batch_in_microbatches=batch)
