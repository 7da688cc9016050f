"""Keys and values of positions that were seen before, so that the next ones need not compute them again.

Shapes: b sequences, n heads, d head dim, t tensor-parallel ranks, q new positions.
"""

from dataclasses import dataclass, field

import torch


@dataclass
class KeyValueCache:
    """One stage's keys and values, by layer, for sequences of at most `capacity` positions."""

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
