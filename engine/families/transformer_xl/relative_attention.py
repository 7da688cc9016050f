"""Attention by content and distance, over a segment and the memory of earlier ones (Dai et al. 2019, Section 3.3).

Shapes: b microbatch, s segment, m memory, k = m + s, h hidden, n heads, d head dim, t tensor-parallel ranks.
"""

import math
from typing import ClassVar

import torch
from torch import nn

from engine.config import ModelConfig
from engine.kernels.registry import kernel
from engine.model.transformer import recomputed
from engine.parallel.layers import ColumnParallelLinear, RowParallelLinear
from engine.parallel.mesh import ParallelMesh
from engine.rng import Dropout


def distance_encoding(length: int, hidden_size: int, device: torch.device) -> torch.Tensor:
    """Encoding R of distances length − 1 … 0, [length, h] float64: sines, then cosines, of 10000^(−2i/h) · distance.

    Dai et al. 2019, from Vaswani et al. 2017, Section 3.5, in the order of the authors' code.
    """
    distances = torch.arange(length - 1, -1, -1, dtype=torch.float64, device=device)
    powers = torch.arange(0, hidden_size, 2, dtype=torch.float64, device=device) / hidden_size
    angles = torch.outer(distances, 10000.0**-powers)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class RelativeAttention(nn.Module):
    """Causal attention with scores (q + u)·k + (q + v)·r(distance), heads divided over the tensor-parallel axis.

    u and v are learned vectors of each head and layer. There are no biases.
    """

    shard_dims: ClassVar[dict[str, int]] = {"content_bias": 0, "position_bias": 0}

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, layer: int, recompute: bool = False) -> None:
        super().__init__()
        self.layer, self.axis, self.recompute = layer, mesh.tp, recompute
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        heads, width = self.num_heads // mesh.tp.size, config.num_heads * config.head_dim
        self.query_key_value = ColumnParallelLinear(config.hidden_size, 3 * width, mesh.tp, bias=False)
        self.distance = ColumnParallelLinear(config.hidden_size, width, mesh.tp, bias=False)
        self.dense = RowParallelLinear(width, config.hidden_size, mesh.tp, bias=False)
        self.content_bias = nn.Parameter(torch.empty(heads, self.head_dim))
        self.position_bias = nn.Parameter(torch.empty(heads, self.head_dim))

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor | None, encoding: torch.Tensor, dropout: Dropout | None
    ) -> torch.Tensor:
        """[s, b, h], a memory [m, b, h] and the encoding [k, h] of distances → [s, b, h]."""
        context = x if memory is None else torch.cat([memory, x])  # [k, b, h]
        k, b, _ = context.shape
        heads = self.num_heads // self.axis.size
        qkv = self.query_key_value(context).view(k, b, heads, 3, self.head_dim)
        query, key, value = qkv.permute(3, 1, 2, 0, 4).unbind(0)  # each [b, n/t, k, d]
        query = query[:, :, k - len(x) :]
        distance = self.distance(encoding).view(k, heads, self.head_dim).transpose(0, 1)  # [n/t, k, d]
        attended = recomputed(self.recompute, self._attend, query, key, value, distance, dropout)
        return self.dense(attended.permute(2, 0, 1, 3).flatten(2))

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, distance: torch.Tensor,
        dropout: Dropout | None,
    ) -> torch.Tensor:  # fmt: skip
        heads, s, k = query.size(1), query.size(2), key.size(2)
        by_content = torch.matmul(query + self.content_bias[:, None], key.transpose(-1, -2))  # [b, n/t, s, k]
        by_distance = torch.matmul(query + self.position_bias[:, None], distance.transpose(-1, -2))
        scores = by_content + _shift(by_distance)
        weights: torch.Tensor = kernel("masked_softmax", scores)(scores, 1.0 / math.sqrt(self.head_dim))
        if dropout is not None:
            keep = dropout.keep(f"layers.{self.layer}.attention", (self.num_heads, s, k), scores.device)
            keep = keep[:, self.axis.rank * heads : (self.axis.rank + 1) * heads]
            weights = weights * dropout.scale(keep, weights.dtype)
        return torch.matmul(weights, value)


def _shift(scores: torch.Tensor) -> torch.Tensor:
    """Turn columns by distance k − 1 … 0 into columns by key. Column j of row i is then the distance i + m − j.

    Row i moves left by s − 1 − i (Dai et al. 2019, Appendix B). Columns of future keys are undefined.
    """
    b, n, s, k = scores.shape
    return torch.nn.functional.pad(scores, (1, 0)).view(b, n, k + 1, s)[:, :, 1:].view(b, n, s, k)
