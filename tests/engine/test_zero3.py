"""The ZeRO-3 baseline computes what the serial model does and holds a share of it."""

import pytest
import torch
import torch.distributed as dist

from engine.config import ModelConfig
from engine.model.gpt2 import GPT2
from engine.parallel.mesh import serial_mesh
from engine.rng import Dropout
from engine.zero3 import shard_zero3
from tests.ranks import run_ranks

MODEL = ModelConfig(num_layers=3, hidden_size=16, num_heads=4, seq_length=8, vocab_size=29, padded_vocab_size=32)
TOKENS = torch.randint(0, 29, (4, 9), generator=torch.Generator().manual_seed(0))


def train(is_sharded: bool) -> tuple[list[float], int]:
    """Losses of five steps in float64 on the whole batch, and the parameter elements this rank holds."""
    model = GPT2(MODEL, serial_mesh()).double()
    model.initialize(1)
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if is_sharded else (1, 0)
    if is_sharded:
        shard_zero3(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    places = tuple(range(rank * 4 // ranks, (rank + 1) * 4 // ranks))
    mine, losses = TOKENS[list(places)], []
    for iteration in range(5):
        optimizer.zero_grad()
        loss = model(mine[:, :-1], mine[:, 1:], Dropout(0.1, 1, iteration, places))
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        if is_sharded:
            dist.all_reduce(total)
        losses.append(total.item() / ranks)
    parameters = [p.to_local() if is_sharded else p for p in model.parameters()]  # type: ignore[operator]
    return losses, sum(p.numel() for p in parameters)


def test_zero3_equals_the_serial_model() -> None:
    [(expected, whole)] = run_ranks(train, 1, False)
    for losses, held in run_ranks(train, 2, True):
        assert losses == pytest.approx(expected, abs=1e-10)
        assert held <= whole / 2 + 16 * MODEL.num_layers
