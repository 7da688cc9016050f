"""Attention outside of training: of next positions to all before them, and of the scored positions
alone.

Shapes: b sequences, s inputs of a layer, q positions of its output, n heads, d head dim, t
tensor-parallel ranks.
"""

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from mlm_repro.engine.kernels.registry import kernel


class Cache(ABC):
    """Positions at which a layer computes its output, and keys and values that they see. Not for a
    divided sequence."""

    @property
    def length(self) -> int:
        """Positions before the inputs of the stage."""
        return 0

    @abstractmethod
    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Outputs of a layer's heads, [q, b, h/t], from its inputs' queries, keys and values [s, b,
        n/t, 3, d]."""

    def rows(self, layer: int, x: Tensor) -> Tensor:
        """A layer's inputs x [s, b, h] at the positions of its output, [q, b, h]."""
        return x


@dataclass
class KeyValueCache(Cache):
    """Keys and values of one stage's layers, for sequences of at most `capacity` positions; the
    inputs are the next."""

    capacity: int
    _stored: dict[int, Tensor] = field(default_factory=dict)
    """Keys and values of each layer, [2, b, n/t, capacity, d]."""
    _seen: Counter[int] = field(default_factory=Counter)
    """Positions that each layer has stored."""

    @property
    def length(self) -> int:
        return min(self._seen.values(), default=0)

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        query, key, value = by_head(qkv)
        b, n, q, d = key.shape
        if layer not in self._stored:
            self._stored[layer] = key.new_empty(2, b, n, self.capacity, d)
        # By layer, because the stage's layers are run one after the other.
        start = self._seen[layer]
        end = self._seen[layer] = start + q
        keys, values = self._stored[layer][:, :, :, :end]
        keys[:, :, start:], values[:, :, start:] = key, value
        return _attend(query, keys, values, torch.arange(start, end, device=qkv.device)[None])


@dataclass
class ScoredPositions(Cache):
    """Positions [b, q] at which alone the last layer computes its output; the layers before it
    compute all."""

    positions: Tensor
    last_layer: int

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        # Whose outputs at every position are the next layer's keys and values.
        if layer != self.last_layer:
            return kernel("attention", qkv)(qkv, None)
        query, key, value = by_head(qkv)
        asked = query.take_along_dim(self.positions[:, None, :, None], dim=2)
        return _attend(asked, key, value, self.positions)

    def rows(self, layer: int, x: Tensor) -> Tensor:
        return rows_at(x, self.positions) if layer == self.last_layer else x


def rows_at(x: Tensor, positions: Tensor) -> Tensor:
    """States [s, b, h] at positions [b, q], [q, b, h]."""
    return x.take_along_dim(positions.T[..., None], dim=0)


def by_head(qkv: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values, each [b, n/t, s, d], of [s, b, n/t, 3, d]."""
    return qkv.permute(3, 1, 2, 0, 4).unbind(0)


def _attend(query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
    """Outputs [q, b, h/t] of queries [b, n/t, q, d] at positions [b or 1, q], which see keys up to
    their own."""
    is_past = (
        torch.arange(key.size(2), device=key.device) <= positions[:, None, :, None]
    )  # [b or 1, 1, q, s]
    context = F.scaled_dot_product_attention(query, key, value, attn_mask=is_past)
    return context.permute(2, 0, 1, 3).flatten(2)
