"""Any model of Hugging Face divided over tensor-parallel ranks by its plan (`shard-hf`), run, and merged (`export`)."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.formats.tensor_plan import DividedBlock, Division, TensorPlan
from engine.parallel.collectives import enter_tensor_parallel, gather_features, leave_tensor_parallel
from engine.parallel.mesh import Axis

HEADS = frozenset({
    "num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_heads", "n_head",
    "encoder_attention_heads", "decoder_attention_heads",
})  # fmt: skip
"""Names by which models count attention's heads."""
WIDTHS = frozenset({"inner_dim", "all_head_size", "split_size", "embed_dim", "hidden_size"})
"""Names by which an attention module knows the width of its heads together."""


def divide(model: nn.Module, plan: TensorPlan, axis: Axis, seed: int = 0) -> nn.Module:
    """Turn a whole model into this rank's part of it, in place, and return it. Inputs, outputs and gradients of copied
    parameters are whole on every rank. Dropout between a block's first and last layers differs on each rank (by
    `seed`); elsewhere ranks with one random state draw the same."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    parts: dict[int, nn.Parameter] = {}
    for name, split in plan.splits.items():
        whole = parameters[name]
        if id(whole) not in parts:
            parts[id(whole)] = nn.Parameter(split.of(whole.data, axis.rank), whole.requires_grad)
        place, _, own = name.rpartition(".")
        setattr(model.get_submodule(place), own, parts[id(whole)])
    for name in plan.summed:
        parameters[name].register_hook(axis.all_reduce)
    random = _RankRandom(seed, axis.rank)
    for block in plan.blocks:
        _Region(model, block, plan.tp, axis, random)
    for name in plan.embeddings:
        words: Any = model.get_submodule(name)
        start, stop = _rows(plan.splits[f"{name}.weight"], axis.rank)
        words.forward = partial(_look_up, words.forward, start, stop, axis)
        padding = words.padding_idx
        words.padding_idx = padding - start if padding is not None and start <= padding < stop else None
    if plan.head is not None:
        head: Any = model.get_submodule(plan.head)
        split = plan.splits[f"{plan.head}.weight"]
        head.forward = partial(_score, head.forward, axis, _rows(split, axis.rank)[0], split.parts[-1][-1][1])
    return model


class _RankRandom:
    """The random state of divided activations, different on each rank."""

    def __init__(self, seed: int, rank: int) -> None:
        self.state = torch.Generator().manual_seed(seed + 1 + rank).get_state()
        self.shared: Tensor | None = None

    def enter(self) -> None:
        self.shared = torch.get_rng_state()
        torch.set_rng_state(self.state)

    def leave(self) -> None:
        if self.shared is not None:
            self.state = torch.get_rng_state()
            torch.set_rng_state(self.shared)
            self.shared = None


class _Region:
    """A block's layers on this rank: its inputs enter once, its sum leaves, heads between them are counted anew."""

    def __init__(self, model: nn.Module, block: DividedBlock, tp: int, axis: Axis, random: _RankRandom) -> None:
        self.axis, self.random = axis, random
        self.entered: list[tuple[Tensor, Tensor]] = []
        for name in block.columns:
            column: Any = model.get_submodule(name)
            if hasattr(column, "nf"):
                column.nf = column.weight.shape[1]
            column.register_forward_pre_hook(self.enter)
        row: Any = model.get_submodule(block.row)
        row.forward = partial(self.leave, row)
        for name in {name.rpartition(".")[0] for name in (*block.columns, block.row)}:
            _divide_heads(model.get_submodule(name), tp)

    def enter(self, column: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not self.entered:
            self.random.enter()
        for whole, entered in self.entered:
            if whole is inputs[0]:
                return (entered,)
        entered = enter_tensor_parallel(inputs[0], self.axis, sequence_parallel=False)
        self.entered.append((inputs[0], entered))
        return (entered,)

    def leave(self, row: Any, x: Tensor) -> Tensor:
        self.random.leave()
        self.entered.clear()
        product = x @ (row.weight.T if isinstance(row, nn.Linear) else row.weight)
        summed = leave_tensor_parallel(product, self.axis, sequence_parallel=False)
        return summed.clone() if row.bias is None else summed + row.bias


def _divide_heads(module: nn.Module, tp: int) -> None:
    if HEADS.isdisjoint(vars(module)):
        return
    settings: Any = copy.copy(getattr(module, "config", None))
    for place, names in ((module, HEADS | WIDTHS), (settings, HEADS)):
        for name in names & vars(place).keys() if place is not None else ():
            if type(count := vars(place)[name]) is int:
                setattr(place, name, count // tp)
    if settings is not None:
        module.config = settings


def _rows(split: Division, rank: int) -> tuple[int, int]:
    (rows,) = split.parts[rank]
    return rows


def _look_up(forward: Callable[[Tensor], Tensor], start: int, stop: int, axis: Axis, ids: Tensor) -> Tensor:
    """Rows of a vocabulary of which this rank has [start, stop)."""
    inside = (ids >= start) & (ids < stop)
    rows = forward((ids - start).where(inside, 0)) * inside[..., None]
    return leave_tensor_parallel(rows, axis, sequence_parallel=False)


def _score(forward: Callable[[Tensor], Tensor], axis: Axis, start: int, whole: int, x: Tensor) -> Tensor:
    return gather_features(forward(enter_tensor_parallel(x, axis, sequence_parallel=False)), axis, start, whole)
