"""A sharded optimizer holds its share of the state, and its checkpoints are anybody's."""

import numpy as np
import pytest
import torch

from engine.config import ModelConfig, Precision, TrainConfig
from engine.launch.mesh import build_mesh
from engine.launch.threads import run_threads
from engine.model.gpt2 import GPT2
from engine.optim.adam import FlatAdamW
from engine.optim.gradients import GradientReducer
from engine.optim.precision import DTYPES
from engine.parallel.layout import Layout
from engine.parallel.sharding import sharded_parameters

MODEL = ModelConfig(num_layers=2, hidden_size=16, num_heads=4, seq_length=8, vocab_size=29, padded_vocab_size=32)
State = dict[str, np.ndarray]  # type: ignore[type-arg]


def train_and_move(precision: Precision, shard: bool, restored_shard: bool) -> tuple[int, State, State]:
    """Elements of state held after two steps on two ranks, the state, and the state after a move and another step."""
    mesh = build_mesh(Layout(dp=2))

    def build(shard: bool) -> tuple[GPT2, FlatAdamW, GradientReducer]:
        model = GPT2(MODEL, mesh).to(DTYPES[precision])
        model.initialize(3)
        optimizer = FlatAdamW(sharded_parameters(model, mesh), TrainConfig(clip_gradient=0.0), mesh, shard)
        return model, optimizer, GradientReducer(optimizer.groups, mesh)

    tokens = torch.randint(0, MODEL.vocab_size, (2, MODEL.seq_length + 1), generator=torch.Generator().manual_seed(5))
    mine = tokens[mesh.dp.rank : mesh.dp.rank + 1]

    def step(model: GPT2, optimizer: FlatAdamW, reducer: GradientReducer) -> None:
        reducer.begin()
        model(mine[:, :-1], mine[:, 1:]).backward()
        reducer.finish(1)
        optimizer.step(1e-2, optimizer.gradient_norm())

    def whole(optimizer: FlatAdamW) -> State:
        return {f"{what}.{p.name}": tensor.detach().clone().numpy() for p, what, tensor in optimizer.state()}

    first = build(shard)
    for _ in range(2):
        step(*first)
    model, optimizer, _ = first
    state = whole(optimizer)
    held = sum(group.exp_avg.numel() + group.exp_avg_sq.numel() for group in optimizer.groups)
    second = build(restored_shard)
    with torch.no_grad():
        for theirs, ours in zip(model.parameters(), second[0].parameters(), strict=True):
            ours.copy_(theirs)
        second[1].restore(
            2, lambda tensors: [t.copy_(torch.from_numpy(state[f"{what}.{p.name}"])) for p, what, t in tensors] and None
        )
    step(*second)
    return held, state, whole(second[1])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_is_halved_and_moves_both_ways(precision: Precision) -> None:
    plain = run_threads(train_and_move, 2, precision, False, True)
    sharded = run_threads(train_and_move, 2, precision, True, False)
    for (held, state, moved), (held_sharded, state_sharded, moved_sharded) in zip(plain, sharded, strict=True):
        assert held / 2 <= held_sharded <= held / 2 + 4
        assert state.keys() == state_sharded.keys()
        assert any(name.startswith("master.") for name in state) == (precision == "bf16")
        for name, expected in state.items():
            np.testing.assert_array_equal(state_sharded[name], expected)
            np.testing.assert_array_equal(moved_sharded[name], moved[name])
