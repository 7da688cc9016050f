"""An embedding and a head of torch with torchtitan's loss in chunks, for `mlm-verify layouts
PATH.py:build`. Written for commits of May 2026, such as c2a3771a4."""

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
    parallelize_module,
)

WORDS = 64
HIDDEN = 32
sys.modules.setdefault("tyro", MagicMock())  # reads a command line, and there is none
batch = torch.randint(0, WORDS, (8, 17), generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    """The parts of a language model without layers: an embedding, and a head for its logits. It has
    no `forward`: the function `loss` takes embedded words through the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)


def loss(model: Model, rows: Tensor) -> Tensor:
    """Return a scalar tensor, from which gradients can be computed: the mean loss over all rows and
    positions of the next words, in nats, by torchtitan's ChunkedCELoss, which takes hidden states
    chunk by chunk through the head and back. `rows` are token ids [b, s + 1]: all but the last of
    each row go in, and all but the first are predicted."""
    chunked = import_module("torchtitan.components.loss").ChunkedCELoss
    by_chunks = chunked(chunked.Config())
    by_chunks.set_lm_head(model.head)
    words = rows[:, 1:]
    mean: Tensor = by_chunks(model.embed(rows[:, :-1]), words, words.numel())
    return mean


def build(layout: Any) -> Model:
    """Return this rank's share of a new Model, on the CPU; of `layout` it reads `tp` alone. The
    share is the whole model if `layout.tp` is 1. Otherwise `layout.tp` ranks divide the words of
    the embedding and of the output head, the embedding gives each rank a part of the sequence, and
    the head gives every rank all logits. Every rank calls it. Seeds torch's generator, always with
    the same number, so that every rank of every layout draws the same whole weights."""
    torch.manual_seed(1)
    model = Model()
    if layout.tp > 1:
        plan = {
            "embed": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
            ),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        mesh = init_device_mesh("cpu", (layout.tp,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, plan)
    return model
