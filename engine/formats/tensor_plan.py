"""A tensor-parallel plan for any model of Hugging Face, read off the derivatives of the model itself.

Linear layers that feed another one form a block: its first layers can be divided by columns and its last by rows (2019
paper, Section 3) exactly if each rank's part of the last one's input depends on outputs of the first ones that no other
rank's part depends on. Automatic differentiation says on which. So fused and interleaved projections, grouped heads,
gates and biases by head are found without a list of names, and a layer that mixes features, such as a norm over the
whole width, leaves its block undivided.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn

from mlm_repro.lineage.errors import BadInput

Part = list[tuple[int, int]]
"""A rank's indices of a dim, as ranges [start, stop)."""
How = Literal["columns", "rows", "heads", "vocabulary"]
TOKENS = 24


@dataclass(frozen=True)
class Division:
    """How a parameter is divided."""

    how: How
    dim: int
    parts: list[Part]
    """Each rank's indices along `dim`."""

    def of(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's part of the whole tensor."""
        return tensor.index_select(self.dim, indices(self.parts[rank])).contiguous()

    def merge(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """The whole tensor of the ranks' parts."""
        order = torch.cat([indices(part) for part in self.parts])
        return torch.cat(tensors, self.dim).index_select(self.dim, order.argsort()).contiguous()


@dataclass(frozen=True)
class DividedBlock:
    """Modules between which activations are divided, by name."""

    columns: list[str]
    row: str


@dataclass
class TensorPlan:
    """The part of a model that each of `tp` ranks holds."""

    tp: int
    splits: dict[str, Division] = field(default_factory=dict)
    """Divided parameters by name; the others are copied."""
    blocks: list[DividedBlock] = field(default_factory=list)
    embeddings: list[str] = field(default_factory=list)
    """Modules that look up rows of a vocabulary that is divided."""
    head: str | None = None
    """Output layer whose columns are divided as the vocabulary is."""
    copied: dict[str, str] = field(default_factory=dict)
    """Linear layers that stay whole → the reason."""
    summed: set[str] = field(default_factory=set)
    """Copied parameters that divided activations meet: a gradient is the sum of the ranks'."""


def indices(part: Part) -> torch.Tensor:
    """The indices of a part, in order."""
    return torch.cat([torch.arange(start, stop) for start, stop in part] or [torch.arange(0)])


def is_linear(module: nn.Module) -> bool:
    """True for a linear layer, GPT-2's transposed kind among them."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def output_dim(module: nn.Module) -> int:
    """Dim of the weight that counts a linear layer's outputs."""
    return 0 if isinstance(module, nn.Linear) else 1


def make_plan(model: nn.Module, tp: int) -> TensorPlan:
    """The plan of a model of transformers on `tp` ranks. Runs the model once on a few random tokens.

    The weights must be in general position: a feature that nothing depends on cannot be placed. Those that
    transformers draws are, trained ones of dead units are not.
    """
    plan = TensorPlan(tp)
    names = {module: name for name, module in model.named_modules()}
    head = model.get_output_embeddings()  # type: ignore[operator]
    words = model.get_input_embeddings()  # type: ignore[operator]
    rows = words.weight.shape[0]
    parts = [[(int(part[0]), int(part[-1]) + 1)] for part in torch.arange(rows).tensor_split(tp)]
    by_rows = Division("vocabulary", 0, parts)
    tables = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    plan.embeddings = [name for name, module in tables.items() if module.weight.shape[0] == rows]
    if head is not None and is_linear(head) and head.weight.shape[output_dim(head)] == rows:
        plan.head = names[head]
        plan.splits |= {f"{plan.head}.{name}": by_rows for name, _ in head.named_parameters()}
    plan.splits |= {f"{name}.weight": by_rows for name in plan.embeddings}
    linears = {module: name for module, name in names.items() if is_linear(module) and module is not head}
    others = {
        name: parameter for name, parameter in model.named_parameters()
        if name.rpartition(".")[0] not in (*linears.values(), *plan.embeddings, plan.head)
    }  # fmt: skip
    _Tracer(plan, linears, others).run(model)
    by_parameter = {id(model.get_parameter(name)): split for name, split in plan.splits.items()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in by_parameter:
            plan.splits[name] = by_parameter[id(parameter)]
    return plan


class _Tracer:
    """Finds blocks while the model runs: every output of a linear layer is cut off from what made it."""

    def __init__(self, plan: TensorPlan, linears: Mapping[nn.Module, str], others: Mapping[str, nn.Parameter]) -> None:
        self.plan, self.linears, self.others = plan, linears, others
        self.open: dict[nn.Module, torch.Tensor] = {}
        """Layers since the last block's end, with their outputs."""
        self.done = set[nn.Module]()
        self.generator = torch.Generator().manual_seed(0)

    def run(self, model: nn.Module) -> None:
        with ExitStack() as hooks, torch.enable_grad():
            for module in self.linears:
                hooks.enter_context(module.register_forward_hook(self.ran))
            model(**some_tokens(model))
        for module in self.linears.keys() - self.done:
            self.plan.copied[self.linears[module]] = "no linear layer follows it" if module in self.open else "not run"

    def ran(self, module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        x = inputs[0]
        if module in self.done or module in self.open:
            raise BadInput(f"{self.linears[module]} runs twice in a pass: such a model cannot be divided")
        sources = self.sources(x)
        if sources:
            reason = self.close(module, x, sources)
            for column in sources:
                del self.open[column]
                self.done.add(column)
                if reason:
                    self.plan.copied[self.linears[column]] = reason
            if not reason:
                self.done.add(module)
                return output.detach()
        leaf = self.open[module] = output.detach().requires_grad_()
        return leaf.clone()

    def sources(self, x: torch.Tensor) -> dict[nn.Module, torch.Tensor]:
        """Open layers that `x` depends on."""
        if not self.open or not x.requires_grad:
            return {}
        gradients = torch.autograd.grad(x.sum(), list(self.open.values()), retain_graph=True, allow_unused=True)
        return {layer: leaf for (layer, leaf), gradient in zip(self.open.items(), gradients, strict=True)
                if gradient is not None}  # fmt: skip

    def close(self, row: nn.Module, x: torch.Tensor, columns: dict[nn.Module, torch.Tensor]) -> str:
        """Divide `columns` and `row`; returns the reason why that cannot be, or nothing."""
        tp, width = self.plan.tp, x.shape[-1]
        if width % tp:
            return f"{tp} does not divide {self.linears[row]}'s {width} inputs"
        step = width // tp
        weights = torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
        names = [name for name, parameter in self.others.items() if parameter.requires_grad]
        sources = [*columns.values(), *(self.others[name] for name in names)]
        masks = []
        for start in range(0, width, step):
            part = slice(start, start + step)
            total = (x * weights)[..., part].sum()
            gradients = torch.autograd.grad(total, sources, retain_graph=True, allow_unused=True)
            masks.append([gradient if gradient is None else gradient != 0 for gradient in gradients])
        splits, summed = {}, set()
        for place, (column, output) in enumerate(columns.items()):
            parts = _disjoint([mask[place] for mask in masks], output.dim() - 1)
            if isinstance(parts, str):
                return f"{self.linears[column]}: {parts}"
            for name, parameter in column.named_parameters():
                dim = output_dim(column) if parameter.dim() == 2 else 0
                splits[f"{self.linears[column]}.{name}"] = Division("columns", dim, parts)
        for place, name in enumerate(names, start=len(columns)):
            used = [mask[place] for mask in masks]
            if any(mask is not None for mask in used):
                by_heads = (Division("heads", dim, parts) for dim in range(self.others[name].dim())
                         if not isinstance(parts := _disjoint(used, dim), str))  # fmt: skip
                if split := next(by_heads, None):
                    splits[name] = split
                else:
                    summed.add(name)
        by_inputs = [[(start, start + step)] for start in range(0, width, step)]
        splits[f"{self.linears[row]}.weight"] = Division("rows", 1 - output_dim(row), by_inputs)
        self.plan.splits |= splits
        self.plan.summed |= summed
        self.plan.blocks.append(DividedBlock([self.linears[column] for column in columns], self.linears[row]))
        return ""


def _disjoint(masks: Sequence[torch.Tensor | None], dim: int) -> list[Part] | str:
    """Indices of `dim` that each rank's part depends on, or why they do not divide the dim."""
    known = [mask for mask in masks if mask is not None]
    if len(known) < len(masks):
        return "a rank's part does not depend on it"
    lines = torch.stack([mask.movedim(dim, 0).reshape(mask.shape[dim], -1).any(1) for mask in known])
    count = lines.sum(0)
    if (count > 1).any():
        return "every rank's part depends on all of it" if (count == len(masks)).all() else "ranks' parts share heads"
    if (count == 0).any() or len(set(lines.sum(1).tolist())) > 1:
        return "nothing depends on some of it"
    return [_ranges(line.nonzero().flatten().tolist()) for line in lines]


def _ranges(numbers: list[int]) -> Part:
    breaks = [0, *(place for place, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1), len(numbers)]
    return [(numbers[start], numbers[stop - 1] + 1) for start, stop in pairwise(breaks)]


def some_tokens(model: nn.Module) -> dict[str, torch.Tensor]:
    """Random tokens as the model's arguments."""
    config: Any = model.config
    length = min(TOKENS, getattr(config, "max_position_embeddings", None) or TOKENS)
    tokens = torch.randint(0, config.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))
    names = ("input_ids", "decoder_input_ids") if config.is_encoder_decoder else ("input_ids",)
    return dict.fromkeys(names, tokens)


def without_numbers(text: str) -> str:
    """The text with the number of each layer as a star, so that equal layers are described alike."""
    return re.sub(r"\d+(?=\.)", "*", text)


def describe_plan(plan: TensorPlan, model: nn.Module) -> list[str]:
    """A line for each kind of layer, equal ones of many layers together, beside the plan that transformers has."""
    theirs: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    dropout = "different on each rank between a block's first and last layers, the same elsewhere"
    rows: dict[tuple[str, str], None] = {}
    for name, module in model.named_modules():
        if is_linear(module) or isinstance(module, nn.Embedding) or f"{name}.weight" in plan.splits:
            split = plan.splits.get(f"{name}.weight")
            how = f"by {split.how}" if split else f"copied: {plan.copied.get(name, 'no part of a block')}"
            rows[without_numbers(name), without_numbers(how)] = None
    width = max(len(kind) for kind, _ in rows)
    said = [f"{kind:{width}}  {how}" + (f"  (transformers: {theirs[kind]})" if kind in theirs else "")
            for kind, how in rows]  # fmt: skip
    if not theirs:
        said.append("transformers has no plan for this model")
    return [*said, f"dropout: {dropout}"]
