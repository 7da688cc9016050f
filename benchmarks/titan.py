"""A small mixture of experts of torchtitan on its own plan, for `mlm-verify layouts
PATH.py:build`."""

import inspect
import sys
from importlib import import_module
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

WORDS = 64
HIDDEN = 32
for absent in (
    "tyro",
    "torchtitan.components.dataloader",
    "torchtitan.components.validate",
    "torchtitan.datasets.hf_datasets",
):
    sys.modules.setdefault(absent, MagicMock())  # its experts do not use these
histogram = torch.histc
# It takes no integers on a CPU.
torch.histc = lambda of, *rest, **named: histogram(of.double(), *rest, **named).to(of.dtype)
batch = torch.randint(0, WORDS, (8, 17), generator=torch.Generator().manual_seed(1))


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Return one number, the mean over all rows and positions of a model's cross-entropy for the
    next word, in nats, as a tensor with a gradient. `rows` are token ids [b, s + 1]: the model is
    given all but the last of each row, and is to predict all but the first."""
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def experts(score_before_experts: bool) -> Any:
    """Return a new layer of four experts, two for each word, on the CPU, built by torchtitan's
    older or newer interface, whichever is installed. If `score_before_experts` is true, scores
    multiply the experts' inputs, else their outputs. The weights are drawn by torch's generator."""
    settings = {
        "num_experts": 4,
        "score_before_experts": score_before_experts,
        "score_func": "softmax",
        "top_k": 2,
        "use_grouped_mm": False,
        "route_norm": True,
    }
    try:
        moe = import_module("torchtitan.models.moe")
        layer = moe.MoE(moe.MoEArgs(**settings), dim=HIDDEN, hidden_dim=16)
    except ModuleNotFoundError:
        kind = import_module("torchtitan.models.common.moe").MoE
        layer = kind(kind.Config(**settings, hidden_dim=16), dim=HIDDEN)
    with torch.no_grad():
        layer.init_weights(init_std=0.1, buffer_device=torch.device("cpu"))
    return layer


class Block(nn.Module):
    """A residual block without attention: maps hidden states [b, s, HIDDEN] to the same shape by
    adding the output of a mixture of experts on the normed states. The layer of experts is a new
    one, built by the function `experts`. If `score_before_experts` is true, the router's scores
    multiply the experts' inputs, else their outputs."""

    moe_enabled = True

    def __init__(self, score_before_experts: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.moe = experts(score_before_experts)

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden states `x` [b, s, h] with the experts' output on the normed states
        added."""
        y: Tensor = x + self.moe(self.norm(x))
        return y


class Model(nn.Module):
    """A small language model without attention and positions, token ids [b, s] → logits [b, s, v]:
    embedded words, two blocks with experts, and a head. If `score_before_experts` is true, scores
    multiply the experts' inputs, else their outputs. The weights are random."""

    def __init__(self, score_before_experts: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleDict(
            {str(number): Block(score_before_experts) for number in range(2)}
        )
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [b, s, v] for token ids [b, s]."""
        x = self.embed(tokens)
        for layer in self.layers.values():
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def build(layout: Any, score_before_experts: bool = True) -> nn.Module:
    """Return this rank's share of a small language model, on the CPU: `layout.tp` ranks divide the
    experts by torchtitan's plan, and the other layers as its models divide them. It is the whole
    model if `layout.tp` is 1. The router's scores multiply the experts' inputs or, if
    `score_before_experts` is false, their outputs. Every rank calls it. Seeds torch's generator."""
    torch.manual_seed(1)
    model = Model(score_before_experts)
    if layout.tp > 1:
        mesh = init_device_mesh("cpu", (layout.tp,), mesh_dim_names=("tp",))
        plan: dict[str, Any] = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(
            model, mesh, plan | {f"layers.{name}.norm": SequenceParallel() for name in model.layers}
        )
        try:
            divide = import_module("torchtitan.models.llama4.infra.parallelize").apply_moe_ep_tp
        except ModuleNotFoundError:
            divide = import_module("torchtitan.models.llama4.parallelize").apply_moe_ep_tp
        taken = inspect.signature(divide).parameters
        absent = [
            name
            for name in taken
            if name in ("ep_mesh", "ep_tp_mesh", "etp_mesh", "ep_etp_mesh", "etp_enabled")
        ]
        divide(model, tp_mesh=mesh, **dict.fromkeys(absent))
    return model


def build_late(layout: Any) -> nn.Module:
    """Return what the function `build` of this file returns for `layout` with
    `score_before_experts` = False: this rank's share of a small model with torchtitan's experts,
    divided over `layout.tp` ranks, where the router's scores multiply the experts' outputs, not
    their inputs. A case of fixes.toml names this function as its program. Every rank calls it.
    Seeds torch's generator."""
    return build(layout, score_before_experts=False)
