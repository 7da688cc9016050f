"""Tensors: any module is recorded in our names, shards are merged or refused, and differences are
named."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mlm_repro.engine.compare.recorder import RankPlace, Recorder, moved, read_names
from mlm_repro.engine.compare.tensors import TensorPart, assemble
from mlm_repro.lineage.errors import IntegrityFailure

NAMES = """
batch_first = true
transposed = ["dense.weight"]
grouped = ["query_key_value.weight"]
columns = ["dense"]
[outputs]
"blocks.*" = "layers.*"
"blocks.*.second" = "layers.*.dense"
[parameters]
"blocks.*.first.weight" = "layers.*.query_key_value.weight"
"blocks.*.second.weight" = "layers.*.dense.weight"
[divided]
"dense.weight" = 0
"""


class Block(nn.Module):
    """Somebody's module: activations [b, s, h], one weight that no map names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.gain = (
            nn.Linear(4, 12, bias=False),
            nn.Linear(12, 4, bias=False),
            nn.Parameter(torch.ones(4)),
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x + self.gain * self.second(self.first(x)), None


def test_any_module_is_recorded_in_our_names_and_order(tmp_path: Path) -> None:
    (tmp_path / "names.toml").write_text(NAMES)
    module = nn.Module()
    module.blocks = nn.ModuleList([Block(), Block()])
    found: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}
    recorder = Recorder(
        read_names(str(tmp_path / "names.toml")),
        lambda piece: found.update({(piece.tensor, piece.start): piece.value}),
        RankPlace(tp=2, tp_rank=1, first_layer=3),
        heads=2,
    )
    end, states, outputs = recorder.watch(module, [0, 2], scale=2.0), [], []
    for microbatch in torch.randn(2, 2, 5, 4):
        x = microbatch.requires_grad_()
        for block in module.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)[0]
        x.pow(2).sum().backward()
        states.append(x.detach())
    end()
    module.blocks[0](torch.zeros(1, 1, 4))  # nobody watches any more
    for (tensor, start), value in found.items():
        outputs.append((tensor, start))
        if tensor.endswith("output of layers.4"):
            state = states[start[1] // 2].transpose(0, 1)
            np.testing.assert_array_equal(value, state * (4.0 if "gradient" in tensor else 1.0))
    starts = [(0, 0), (0, 2)]
    names = [f"{what}output of layers.{n}" for n in (3, 4) for what in ("", "gradient of ")]
    assert set(outputs) == {
        *((name, (*start, 0)) for name in names for start in starts),
        *((f"{name}.dense", (*start, 4)) for name in names for start in starts),
    }
    for name, parameter in module.named_parameters():
        recorder.parameter("updated ", name, parameter)
    block = module.blocks[1]
    np.testing.assert_array_equal(
        found["updated layers.4.dense.weight", (12, 0)], block.second.weight.detach().T
    )
    rows = [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]  # [3, n, d] → [n, 3, d]
    np.testing.assert_array_equal(
        found["updated layers.4.query_key_value.weight", (0, 0)], block.first.weight.detach()[rows]
    )
    assert [name for name, _ in module.named_parameters() if recorder.ours(name) is None] == [
        "blocks.0.gain",
        "blocks.1.gain",
    ]
    for weight in ("layers.0.dense.weight", "layers.0.query_key_value.weight"):
        value = torch.randn(12, 12)
        ours = recorder.names.in_our_order(weight, value, recorder.heads)
        assert recorder.names.in_their_order(weight, ours, recorder.heads).equal(value)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.data(),
)
def test_shards_make_the_whole_or_are_refused(
    rows: list[int], columns: list[int], data: st.DataObject
) -> None:
    whole = np.random.default_rng(0).random((sum(rows), sum(columns)))
    pieces = [
        TensorPart(
            0,
            "loss",
            (sum(rows[:i]), sum(columns[:j])),
            whole[sum(rows[:i]) : sum(rows[: i + 1]), sum(columns[:j]) : sum(columns[: j + 1])],
        )
        for i in range(len(rows))
        for j in range(len(columns))
    ]
    shuffled = data.draw(st.permutations(pieces))
    # A replica is no overlap.
    assert np.array_equal(assemble([*shuffled, shuffled[0]])[0, "loss"], whole)
    inner = [piece for piece in pieces if piece.end != whole.shape]
    if inner:
        with pytest.raises(IntegrityFailure, match="some are missing"):
            assemble([piece for piece in pieces if piece is not inner[-1]])
    if len(pieces) > 1:
        with pytest.raises(IntegrityFailure, match="overlap"):
            assemble([*pieces, TensorPart(0, "loss", (0, 0), whole)])
    with pytest.raises(IntegrityFailure, match=r"overlap|some are missing"):  # it is longer, too
        assemble([*pieces, TensorPart(0, "loss", (0, 0), np.zeros((sum(rows) + 1, 1)))])


def test_the_example_of_the_documentation_compares_a_module_of_others() -> None:
    import transformers

    page = (Path(__file__).parents[2] / "docs" / "other-engines.md").read_text(encoding="utf-8")
    (example,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "Recorder" in block
    )
    config = transformers.GPT2Config(n_layer=1, n_embd=24, n_head=12, n_positions=8, vocab_size=16)
    names = {
        "model": transformers.GPT2LMHeadModel(config).eval(),
        "tokens": torch.arange(8).view(2, 4),
    }
    exec(example, names)
    found = names["tensors"]
    assert isinstance(found, dict)
    assert found[0, "output of layers.0"].shape == (4, 2, 24)
    assert found[0, "gradient of layers.0.self_attention.query_key_value.weight"].shape == (72, 24)


def test_a_weight_is_perturbed_on_its_own_device() -> None:
    """The random numbers are the CPU's, so that a GPU's weights move as a CPU's do."""
    assert moved(torch.ones(3, device="meta"), "a", 1).device.type == "meta"
    weight = torch.linspace(0.5, 1, 9)
    apart = (moved(weight, "a", 1) - weight) / weight
    assert 0 < apart.abs().max() <= torch.finfo(torch.float32).eps
