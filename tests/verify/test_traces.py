"""Traces: any module is recorded in our names, shards are merged or refused, and differences are named."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from engine.compare.recorder import RankPlace, Recorder, read_names
from engine.compare.tensors import TensorPart, assemble
from lineage.errors import IntegrityFailure
from tests.commands import Command
from verify.traces import Trace, finish_trace, read_draw, write_rank

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
    np.testing.assert_array_equal(found["updated layers.4.dense.weight", (12, 0)], block.second.weight.detach().T)
    rows = [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]  # [3, n, d] → [n, 3, d]
    np.testing.assert_array_equal(
        found["updated layers.4.query_key_value.weight", (0, 0)], block.first.weight.detach()[rows]
    )
    assert [name for name, _ in module.named_parameters() if recorder.ours(name) is None] == [
        "blocks.0.gain", "blocks.1.gain"
    ]  # fmt: skip
    for weight in ("layers.0.dense.weight", "layers.0.query_key_value.weight"):
        value = torch.randn(12, 12)
        ours = recorder.names.in_our_order(weight, value, recorder.heads)
        assert recorder.names.in_their_order(weight, ours, recorder.heads).equal(value)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.data()
)
def test_shards_make_the_whole_or_are_refused(rows: list[int], columns: list[int], data: st.DataObject) -> None:
    whole = np.random.default_rng(0).random((sum(rows), sum(columns)))
    pieces = [
        TensorPart(0, "loss", (sum(rows[:i]), sum(columns[:j])),
              whole[sum(rows[:i]) : sum(rows[: i + 1]), sum(columns[:j]) : sum(columns[: j + 1])])
        for i in range(len(rows)) for j in range(len(columns))
    ]  # fmt: skip
    shuffled = data.draw(st.permutations(pieces))
    assert np.array_equal(assemble([*shuffled, shuffled[0]])[0, "loss"], whole)  # a replica is no overlap
    inner = [piece for piece in pieces if piece.end != whole.shape]
    if inner:
        with pytest.raises(IntegrityFailure, match="some are missing"):
            assemble([piece for piece in pieces if piece is not inner[-1]])
    with pytest.raises(IntegrityFailure, match="overlap"):
        assemble([*pieces, TensorPart(0, "loss", (0, 0), np.zeros((sum(rows) + 1, 1)))])


def write(directory: Path, values: dict[str, float], draws: int = 0, unnamed: tuple[str, ...] = ()) -> Path:
    """A trace of two ranks, each with half of every tensor."""
    for draw in range(draws + 1):
        for rank in range(2):
            pieces = [
                TensorPart(0, name, (2 * rank,), np.full(2, value + draw * 1e-7)) for name, value in values.items()
            ]
            write_rank(directory, draw, rank, pieces)
    finish_trace(directory, Trace(engine="theirs", unnamed=list(unnamed)))
    return directory


def test_the_first_tensor_beyond_its_tolerance_is_named_and_all_are_listed(verify: Command, tmp_path: Path) -> None:
    names = ["output of layers.1", "output of x", "gradient norm", "updated layers.0.weight", "updated extra"]
    reference = write(tmp_path / "a", dict.fromkeys(names, 1.0), 4)
    other = write(
        tmp_path / "b", dict.fromkeys(names[:4], 1.0) | {"output of x": 1.5, "gradient norm": 2.0, "loss": 1.0},
        unnamed=("their.gain",),
    )  # fmt: skip
    done = verify("diff", reference, other)
    assert done.code == 3
    assert done.error.startswith(f"error: output of x in iteration 1 differs from {reference} by 5.0e-01 at [")
    assert done.out.splitlines() == [
        f"{other} lacks, because the name map does not name them: their.gain",
        f"only in {reference}: updated extra",
        f"only in {other}: loss",
        "4 tensors compared, 2 beyond their tolerance",
        "  iteration 1, output of x: difference 5.0e-01, tolerance 1.2e-05",
        "  iteration 1, gradient norm: difference 1.0e+00, tolerance 1.2e-05",
    ]
    assert verify("diff", reference, reference).code == 0


def test_traces_that_cannot_be_compared_are_refused(verify: Command, tmp_path: Path) -> None:
    good = write(tmp_path / "good", {"loss": 1.0}, 1)
    single = write(tmp_path / "single", {"loss": 1.0})
    no_draws = verify("diff", single, good)
    assert (no_draws.code, no_draws.error) == (
        2, f"error: {single} has no draws to take tolerances from: record it with --draws 4"
    )  # fmt: skip
    nothing = verify("diff", good, tmp_path)
    assert (nothing.code, nothing.error) == (2, f"error: {tmp_path} is not a trace: it has no trace.json")
    another = verify("diff", good, write(tmp_path / "another", {"mean loss": 1.0}))
    assert (another.code, another.error.endswith("have no tensor in common")) == (2, True)
    write_rank(single, 0, 2, [TensorPart(0, "loss", (1,), np.ones(4))])
    overlapping = verify("diff", good, single)
    assert overlapping.code == 6
    assert overlapping.error.startswith(f"error: {single}: shards of loss in iteration 1 overlap: ")
    for start, said in (((1, 2), "rank-2.safetensors is not a file that a rank"), ((1 << 70,), "lies outside")):
        write_rank(single, 0, 2, [TensorPart(0, "loss", start, np.ones(4))])
        damaged = verify("diff", good, single)
        assert (damaged.code, said in damaged.error) == (6, True), damaged.err
    (single / "draw-0" / "rank-1.safetensors").write_bytes(b"\x00" * 40)
    damaged = verify("diff", good, single)
    assert damaged.code == 6
    assert "rank-1.safetensors is not a file that a rank recorded" in damaged.error
    (good / "draw-1" / "rank-1.safetensors").unlink()
    half = verify("diff", good, good)
    assert (half.code, half.error) == (6, f"error: {good}: its draws do not have the tensors of the step")


def test_a_step_is_recorded_by_the_command(verify: Command, config: Path, tmp_path: Path) -> None:
    arguments = ("trace", "ours", config, tmp_path / "trace", "--layout", "tp2")
    done = verify(*arguments)
    assert (done.code, done.out) == (0, f"written: {tmp_path / 'trace'} (ours; tiny, tp2, 2 iterations in fp32)\n")
    assert set(read_draw(tmp_path / "trace", 0)) == {"rank-0", "rank-1"}
    assert verify(*arguments).error == f"error: {tmp_path / 'trace'} exists already: name a new directory"
    zero = verify("trace", "megatron-core", config, tmp_path / "zero", "--layout", "dp2-zero1")
    assert (zero.code, zero.error.endswith("leave zero1 out")) == (2, True)
    assert not (tmp_path / "zero").exists()


def test_the_example_of_the_documentation_records_a_module_of_others(
    verify: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    page = (Path(__file__).parents[2] / "docs" / "other-engines.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    config = transformers.GPT2Config(n_layer=1, n_embd=24, n_head=12, n_positions=8, vocab_size=16)
    names = {"model": transformers.GPT2LMHeadModel(config).eval(), "tokens": torch.arange(8).view(2, 4)}
    monkeypatch.chdir(tmp_path)
    exec(example, names)
    found = assemble(read_draw(tmp_path / "their-trace", 0)["rank-0"])
    assert found[0, "output of layers.0"].shape == (4, 2, 24)
    assert found[0, "gradient of layers.0.self_attention.query_key_value.weight"].shape == (72, 24)
    assert verify("diff", "their-trace", "their-trace").error.endswith("record it with --draws 4")
