"""Self-attention of the transformers trained here: heads divided over the tensor-parallel axis.

Shapes: b microbatch, s sequence, h hidden, n heads, d head dim, t tensor-parallel ranks.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from engine.config import ModelConfig
from engine.kernels.attention import reference
from engine.kernels.registry import kernel
from engine.linear import linear
from engine.model.recompute import recomputed
from engine.parallel.collectives import columns, join_columns
from engine.parallel.layers import ColumnParallelLinear, RowParallelLinear
from engine.parallel.mesh import ParallelMesh
from engine.rng import Dropout


@dataclass
class KeyValueCache:
    """One stage's keys and values, by layer, for sequences of at most `capacity` positions, kept for the next ones."""

    capacity: int
    length: int = 0
    """Positions that every layer has seen."""
    _stored: dict[int, torch.Tensor] = field(default_factory=dict)

    def extend(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep keys and values of the next positions, [b, n/t, q, d]; those of every position so far."""
        if layer not in self._stored:
            b, n, _, d = key.shape
            self._stored[layer] = key.new_empty(2, b, n, self.capacity, d)
        stored, end = self._stored[layer], self.length + key.size(2)
        stored[0, :, :, self.length : end], stored[1, :, :, self.length : end] = key, value
        return stored[0, :, :, :end], stored[1, :, :, :end]


class SelfAttention(nn.Module):
    """Causal multi-head attention with heads divided over the tensor-parallel axis.

    The rows of `query_key_value` are ordered [n, 3, d] (Megatron checkpoint versions 2 and 3), so that a contiguous
    slice holds whole heads. The bias of `dense` is left to `engine.model.transformer.add_branch`. Positions are learned
    and added by its `Embedding`; rotary ones would turn queries and keys here, in `_attend_part`, `_attend_at` and
    `forward_next`.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, layer: int, recompute: bool = False) -> None:
        super().__init__()
        self.layer, self.axis, self.recompute = layer, mesh.tp, recompute
        self.num_heads, self.head_dim, h = config.num_heads, config.head_dim, config.hidden_size
        self.query_key_value = ColumnParallelLinear(h, 3 * h, mesh.tp, mesh.sequence_parallel)
        self.dense = RowParallelLinear(h, h, mesh.tp, mesh.sequence_parallel)

    def forward(self, x: torch.Tensor, dropout: Dropout | None) -> torch.Tensor:
        parts = columns(self.query_key_value(x), self.axis.virtual)
        contexts = [self._attend_part(part, qkv, dropout) for part, qkv in enumerate(parts)]
        return self.dense(join_columns(contexts), add_bias=False)  # [s, b, h]

    def _attend_part(self, part: int, qkv: torch.Tensor, dropout: Dropout | None) -> torch.Tensor:
        """What the heads of one of this rank's virtual ranks find: [s, b, 3h/V] → [s, b, h/V]."""
        s, b, columns = qkv.shape
        heads = columns // (3 * self.head_dim)
        qkv = qkv.reshape(s, b, heads, 3, self.head_dim)
        attend = kernel("attention", qkv)
        first_head = (self.axis.rank * self.axis.virtual + part) * heads
        mask = dropout.mask(f"layers.{self.layer}.attention", first_row=first_head * s) if dropout else None
        context: torch.Tensor = recomputed(self.recompute and attend is reference, attend, qkv, mask)
        return context

    def forward_at(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The output at positions [b, q] alone, without dropout: [s, b, h] → [q, b, h]."""
        rows = x.gather(0, positions.T.unsqueeze(-1).expand(-1, -1, x.size(2)))  # [q, b, h]
        is_past = torch.arange(x.size(0), device=x.device) <= positions[:, None, :, None]  # [b, 1, q, s]
        parameters = self.query_key_value.weight, self.query_key_value.bias
        weights, biases = (parameter.to_dense().chunk(self.axis.virtual) for parameter in parameters)
        contexts = [self._attend_at(x, rows, is_past, *part) for part in zip(weights, biases, strict=True)]
        return self.dense(join_columns(contexts), add_bias=False)

    def _attend_at(
        self, x: torch.Tensor, rows: torch.Tensor, is_past: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        """What the heads of one virtual rank find for queries of the rows [q, b, h]: [q, b, h/V]."""
        weight = weight.view(-1, 3, self.head_dim, x.size(2))
        bias, heads = bias.view(-1, 3, self.head_dim), len(weight)
        query = linear(rows, weight[:, 0].flatten(0, 1), bias[:, 0].flatten())  # [q, b, h/V]
        query = query.unflatten(2, (heads, self.head_dim)).permute(1, 2, 0, 3)  # [b, n/V, q, d]
        key_value = linear(x, weight[:, 1:].flatten(0, 2), bias[:, 1:].flatten())  # [s, b, 2h/V]
        key, value = key_value.unflatten(2, (heads, 2, self.head_dim)).permute(3, 1, 2, 0, 4)  # each [b, n/V, s, d]
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=is_past)
        return context.permute(2, 0, 1, 3).flatten(2)

    def forward_next(self, x: torch.Tensor, cache: KeyValueCache) -> torch.Tensor:
        """The output at the positions after those in the cache, which takes them up, without dropout: [q, b, h]."""
        heads = self.num_heads // self.axis.size
        qkv = self.query_key_value(x).unflatten(2, (heads, 3, self.head_dim))  # [q, b, n/t, 3, d]
        query, key, value = qkv.permute(3, 1, 2, 0, 4).unbind(0)  # each [b, n/t, q, d]
        key, value = cache.extend(self.layer, key, value)  # each [b, n/t, s, d]
        positions = torch.arange(key.size(2), device=x.device)
        is_past = positions <= positions[cache.length :, None]  # [q, s]
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=is_past)
        return self.dense(context.permute(2, 0, 1, 3).flatten(2), add_bias=False)
