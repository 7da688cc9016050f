"""Attention for generation, where keys and values are stored, and for scoring, where only some
positions are needed.

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
    """Base class of the caches for generation (`KeyValueCache`) and scoring (`ScoredPositions`),
    given to a model's forward pass. The model numbers the positions of its inputs from `length`, by
    default 0. A layer gets from the method `rows` its inputs at the positions where it computes its
    output, by default all, and from the method `attend`, which a subclass must define, the
    attention's outputs at these positions. A cache cannot be used with sequence parallelism; this
    is not checked."""

    @property
    def length(self) -> int:
        """Number of positions that come before the inputs of this forward pass, whose keys and
        values are stored; 0 by default. The model numbers its positions from there."""
        return 0

    @abstractmethod
    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Return the attention outputs of a layer's heads at the q positions where the layer
        computes its output (`rows`), [q, b, h/t], from `qkv`, the queries, keys and values of the
        layer's inputs, [s, b, n/t, 3, d]; `layer` is the layer's global number. A subclass defines
        this, and may store keys and values."""

    def rows(self, layer: int, x: Tensor) -> Tensor:
        """Return the rows of a layer's inputs x [s, b, h] at the positions where the layer computes
        its output, [q, b, h]; by default x itself, with every position. `layer` is the layer's
        global number; a subclass that computes fewer positions overrides this."""
        return x


@dataclass
class KeyValueCache(Cache):
    """Cache for generation: keys and values of one pipeline stage's layers, for sequences of at
    most `capacity` positions; a new one has none. Inputs are the positions after the stored ones;
    the method `attend` stores their keys and values, and returns the attention's outputs. A single
    input at a position beyond `capacity` is not refused, but its keys and values are lost; several
    inputs at once that go beyond it raise RuntimeError."""

    capacity: int
    _stored: dict[int, Tensor] = field(default_factory=dict)
    """Dict global number of a layer → its keys and values, [2, b, n/t, capacity, d], valid up to
    the positions in `_seen`."""
    _seen: Counter[int] = field(default_factory=Counter)
    """Global number of a layer → number of positions that it has stored."""

    @property
    def length(self) -> int:
        return min(self._seen.values(), default=0)

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        query, key, value = by_head(qkv)
        b, n, q, d = key.shape
        if layer not in self._stored:
            # Allocated once at full capacity: growing by a token would copy everything each time.
            self._stored[layer] = key.new_empty(2, b, n, self.capacity, d)
        # Counted by layer, because the stage's layers are run one after the other.
        start = self._seen[layer]
        end = self._seen[layer] = start + q
        keys, values = self._stored[layer][:, :, :, :end]
        keys[:, :, start:] = key
        values[:, :, start:] = value
        return _attend(query, keys, values, torch.arange(start, end, device=qkv.device)[None])


@dataclass
class ScoredPositions(Cache):
    """Cache for scoring at `positions` [b, q]: the layer with the global number `last_layer`
    computes its output at these alone, the layers before it everywhere. It stores no keys and
    values."""

    positions: Tensor
    last_layer: int

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        # Layers before the last compute every position, because their outputs are the next layer's
        # keys and values.
        if layer != self.last_layer:
            return kernel("attention", qkv)(qkv, None)
        query, key, value = by_head(qkv)
        asked = query.take_along_dim(self.positions[:, None, :, None], dim=2)
        return _attend(asked, key, value, self.positions)

    def rows(self, layer: int, x: Tensor) -> Tensor:
        return rows_at(x, self.positions) if layer == self.last_layer else x


def rows_at(x: Tensor, positions: Tensor) -> Tensor:
    """Return the states x [s, b, h] at positions [b, q], indices into s that differ by sequence, as
    a new tensor [q, b, h]."""
    return x.take_along_dim(positions.T[..., None], dim=0)


def by_head(qkv: Tensor) -> tuple[Tensor, ...]:
    """Return a tuple of three views of qkv [s, b, n/t, 3, d]: queries, keys and values, each [b,
    n/t, s, d]."""
    return qkv.permute(3, 1, 2, 0, 4).unbind(0)


def _attend(query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
    """Return the attention outputs [q, b, h/t] of queries [b, n/t, q, d] at positions [b or 1, q].
    Each query sees the keys and values [b, n/t, s, d] up to its own position."""
    # A mask [b or 1, 1, q, s], because torch's `is_causal` aligns the first query with the first
    # key.
    is_past = torch.arange(key.size(2), device=key.device) <= positions[:, None, :, None]
    context = F.scaled_dot_product_attention(query, key, value, attn_mask=is_past)
    return context.permute(2, 0, 1, 3).flatten(2)
