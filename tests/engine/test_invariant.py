"""With `train.invariant` no layout changes a bit, and what that rests on holds on this machine."""

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config import ModelConfig, ParallelConfig, RunConfig
from engine.costs import fullest_rank, parameter_count
from engine.guard.products import check_products
from engine.kernels.registry import kernel
from engine.launch.forked import run_forked
from engine.launch.mesh import build_mesh
from engine.optim.flat import exact_squares
from engine.optim.gradients import merges_in_tree
from engine.parallel import layers
from engine.parallel.layout import Layout, layout_of
from engine.parallel.mesh import serial_mesh, sum_in_tree
from engine.step import build_step
from experiments.measured import traffic
from lineage.config import load_config
from lineage.errors import BadInput, HardwareMissing
from tests.commands import call
from verify.parity import LayoutDiffers, ParityLayout, all_layouts, misfit
from verify.parity_run import run_parity

CONFIG = """
name = "tiny"
[model]
num_layers = 8
hidden_size = 64
num_heads = 8
seq_length = 16
vocab_size = 61
padded_vocab_size = 64
dropout = 0.1
[train]
iterations = 100
global_batch_size = 8
microbatch_size = 2
learning_rate = 1e-2
warmup_iterations = 1
invariant = 8
precision = "fp32"
"""
VIRTUAL, RANKS = 8, 8


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def config(path: Path) -> RunConfig:
    return load_config(path, RunConfig)


def changed(config: RunConfig, section: str, **values: object) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def grid(config: RunConfig) -> list[ParityLayout]:
    """Every layout of at most eight ranks that fits, with microbatches of one, two and four sequences."""
    layouts = [
        ParityLayout(**{**vars(layout), "microbatch": size}) for layout in all_layouts(RANKS) for size in (1, 2, 4)
    ]
    return [layout for layout in layouts if misfit(layout, config) is None]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layouts_drawn_from_the_grid_compute_the_same_bits(config: RunConfig, path: Path, precision: str) -> None:
    """Five in each precision, by a seed."""
    layouts = grid(config)
    assert len(layouts) > 200
    names = ",".join(layout.name for layout in random.Random(precision).sample(layouts, 5))
    done = call(
        {"OMP_NUM_THREADS": "1"}, "mlm-verify", "parallel", path, "--set", f"train.precision={precision}",
        "--layouts", names, "--iterations", 2, ends=0,
    )  # fmt: skip
    assert f"5 layouts compute what the serial run computes, bit for bit in {precision}" in done.out


def test_a_sum_in_another_order_is_found(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """From left to right instead of in a tree: serially eight parts, on two ranks four and four."""

    def left_to_right(parts: list[torch.Tensor]) -> torch.Tensor:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    monkeypatch.setattr(layers, "sum_in_tree", left_to_right)
    fp32 = changed(config, "train", precision="fp32")
    with pytest.raises(LayoutDiffers, match=r"layout tp2: .*iteration 1"):
        run_parity(fp32, "tp2", RANKS, 1)


# What a tree of partial sums is


def in_tree(names: list[str]) -> str:
    """How `merges_in_tree` adds up."""
    sums: list[str] = []
    for name, merges in zip(names, merges_in_tree(len(names)), strict=True):
        sums.append(name)
        for _ in range(merges):
            right = sums.pop()
            sums[-1] = f"({sums[-1]}+{right})"
        assert len(sums) <= math.log2(len(names)) + 2
    (total,) = sums
    return total


@given(st.integers(1, 24), st.sampled_from([1, 2, 4, 8]))
def test_data_parallel_ranks_hold_branches_of_one_tree(each: int, ranks: int) -> None:
    names = [str(place) for place in range(each * ranks)]
    branches = [in_tree(names[rank * each : (rank + 1) * each]) for rank in range(ranks)]
    while len(branches) > 1:
        branches = [f"({left}+{right})" for left, right in zip(branches[::2], branches[1::2], strict=True)]
    assert branches[0] == in_tree(names)


# The norm


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=60), st.randoms())
def test_a_sum_of_squares_depends_on_no_order_and_no_division(values: list[float], rng: random.Random) -> None:
    def of(numbers: list[float], cuts: int) -> float:
        pieces = [torch.tensor(part) for part in np.array_split(np.array(numbers, dtype=np.float32), cuts)]
        return exact_squares(pieces, lambda value, op=None: value, torch.device("cpu"))

    expected = math.fsum(float(np.float32(value)) ** 2 for value in values)
    shuffled = rng.sample(values, len(values))
    assert of(values, 1) == of(shuffled, min(3, len(values)))
    assert of(values, 1) == pytest.approx(expected, rel=1e-12, abs=1e-300)


# Sums over ranks


def parts(count: int = 4) -> list[torch.Tensor]:
    return [torch.randn(8, 3, generator=torch.Generator().manual_seed(rank)) * 10.0**rank for rank in range(count)]


def summed_over_ranks() -> list[list[list[float]]]:
    axis = build_mesh(Layout(tp=4), invariant=4).tp
    mine = parts()[axis.rank]
    rooted = mine.clone()
    axis.reduce(rooted, owner=2)
    scattered = axis.all_gather(axis.reduce_scatter(mine), dim=0)
    odd = axis.all_reduce(mine[:, :1].contiguous().view(-1)[:7].clone())
    return [axis.all_reduce(mine.clone()).tolist(), scattered.tolist(), rooted.tolist(), [odd.tolist()]]


@pytest.mark.parametrize("shares_memory", [True, False])
def test_ranks_add_up_in_one_tree_with_and_without_shared_memory(
    shares_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shares_memory:
        monkeypatch.setattr("engine.launch.mesh.share_memory", lambda *_: None)
    by_rank = run_forked(summed_over_ranks, 4)
    total = sum_in_tree(parts())
    for rank, (reduced, scattered, rooted, odd) in enumerate(by_rank):
        assert torch.equal(torch.tensor(reduced), total)
        assert torch.equal(torch.tensor(scattered), total)
        assert torch.equal(torch.tensor(odd[0]), total[:7, 0])
        assert rank != 2 or torch.equal(torch.tensor(rooted), total)


# What it sends and holds


def sent(ranks: int, parallel: ParallelConfig, batch: int, virtual: int = 0) -> float:
    """Elements that a rank sends in an iteration, the mean over ranks."""
    counted = run_forked(traffic.iteration, ranks, traffic.MODEL, parallel, batch, True, virtual)
    return sum(rank.sent for rank in counted) / ranks / traffic.ELEMENT


def per_sequence(model: ModelConfig, tp: int, sequence_parallel: bool) -> float:
    """Elements that a rank sends more for each sequence than on the ordinary path, all-reduces by rings.

    Under sequence parallelism go the gradients of undivided parameters; the ordinary path gathers the inputs of two
    products a layer a second time and keeps less.
    """
    if not sequence_parallel:
        return 0
    undivided = (6 * model.num_layers + 2) * model.hidden_size + model.seq_length * model.hidden_size
    gathered_again = 2 * model.num_layers * model.seq_length * model.hidden_size
    return (2 * undivided - gathered_again) * (tp - 1) / tp


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}], ids=str)
def test_a_model_of_two_ranks_sends_for_each_sequence_what_the_tree_needs(parallel: dict[str, Any]) -> None:
    config = ParallelConfig(**parallel)
    more = [sent(2, config, batch, VIRTUAL) - sent(2, config, batch) for batch in (4, 8)]
    assert more[1] - more[0] == 4 * per_sequence(traffic.MODEL, config.tp, config.sequence_parallel)


@pytest.mark.parametrize(("parallel", "times"), [({}, 1), ({"shard_optimizer": True}, 2), ({"pp": 2}, 1 / 2)], ids=str)
def test_data_parallel_ranks_send_the_gradient_of_the_outputs_embedding_too(
    parallel: dict[str, Any], times: float
) -> None:
    """Once an iteration; where the optimizer is divided the sums of both embeddings go to every rank, and the weights
    of the output's. Of two stages the last one sends it, which is half of an all-reduce, the mean over ranks."""
    config = ParallelConfig(**parallel)
    ranks = 2 * config.pp
    embedding = traffic.MODEL.padded_vocab_size * traffic.MODEL.hidden_size
    for batch in (4, 8):
        ordinary, invariant = (sent(ranks, config, batch, virtual) for virtual in (0, VIRTUAL))
        assert invariant - ordinary == pytest.approx(times * embedding, abs=16)  # the parts of the norm's exact sum


def test_a_serial_rank_holds_the_outputs_embedding_apart(config: RunConfig) -> None:
    _, step = build_step(config.model, config.train, config.parallel, serial_mesh(invariant=VIRTUAL))
    held = sum(group.flat.numel() for group in step.optimizer.groups)
    words = config.model.padded_vocab_size * config.model.hidden_size
    assert held == parameter_count(config.model) + words
    state = fullest_rank(config.model, config.train, config.parallel).state
    assert state == held * (4 + 4 + 8 + 3 * 4)  # weight, gradient, moments; partial sums of eight sequences


# What it rests on


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_product_does_not_depend_on_where_its_operands_lie(dtype: torch.dtype) -> None:
    model = ModelConfig(num_layers=1, hidden_size=96, num_heads=8, seq_length=48, vocab_size=480, padded_vocab_size=480)
    check_products(model, VIRTUAL, dtype, torch.device("cpu"))


def test_a_machine_whose_products_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_place(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.t() + (1e-6 if x.storage_offset() else 0.0)

    monkeypatch.setattr("engine.guard.products.linear", by_place)
    model = ModelConfig(num_layers=1, hidden_size=32, num_heads=4, seq_length=8, vocab_size=64, padded_vocab_size=64)
    with pytest.raises(HardwareMissing, match="changes with the place of its operands in memory"):
        check_products(model, 4, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [8, 24, 40])
def test_a_row_or_a_column_alone_has_the_bits_it_has_among_others(dtype: torch.dtype, columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((6, 1, columns), (columns,), (columns,))
    )
    norm = kernel("layer_norm", x)
    assert torch.equal(norm(x, weight, bias, 1e-5)[2:3], norm(x[2:3], weight, bias, 1e-5))
    gelu = kernel("bias_gelu", x)
    assert torch.equal(
        gelu(x, bias)[..., : columns // 2], gelu(x[..., : columns // 2].contiguous(), bias[: columns // 2])
    )


def test_sums_of_neighbours_are_joined_first() -> None:
    parts = [torch.tensor(value) for value in (1e8, 1.0, -1e8, 1.0)]
    assert sum_in_tree(parts).item() == 0.0
    assert sum(part.item() for part in parts) == 2.0


# What is refused


@pytest.mark.parametrize(
    ("section", "values", "ranks", "sentence"),
    [
        ("train", {"invariant": 6}, 1, "with train.invariant train.invariant is a power of 2, not 6"),
        ("train", {"invariant": 16}, 1, "train.invariant = 16 does not divide num_heads = 8"),
        ("parallel", {"tp": 8}, 8, ""),
        ("train", {"invariant": 4}, 3, "the global batch of 4 microbatches does not divide over 3"),
        ("train", {"optimizer": "lamb"}, 1, "train.invariant is for a GPT-2 that Adam trains in fp64, fp32 or bf16"),
        ("train", {"precision": "fp16"}, 1, "this is gpt2, adam, fp16"),
        ("parallel", {"shard_parameters": True}, 2, "does not go with parallel.shard_parameters"),
    ],
)
def test_what_it_is_not_for_is_refused(
    config: RunConfig, section: str, values: dict[str, object], ranks: int, sentence: str
) -> None:
    asked = changed(config, section, **values)
    if not sentence:
        assert layout_of(asked, ranks).tp == VIRTUAL
        return
    with pytest.raises(BadInput, match=sentence):
        layout_of(asked, ranks)


def test_more_ranks_than_virtual_ones_are_refused(config: RunConfig) -> None:
    asked = changed(changed(config, "train", invariant=4), "parallel", tp=8)
    with pytest.raises(BadInput, match="tp = 8 is not one of the 4 virtual ranks or a part of them"):
        layout_of(asked, 8)
