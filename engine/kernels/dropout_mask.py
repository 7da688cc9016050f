"""The mask of one dropout site, from which kernels make the random bits they need where they need them."""

from dataclasses import dataclass

import numpy as np
import torch

from engine.compiled import Array
from engine.kernels.registry import implementation


@dataclass(frozen=True)
class DropoutMask:
    """Which elements of rows of numbers are kept at one site, for each sequence of a microbatch."""

    probability: float
    keys: tuple[int, ...]
    """One for each sequence."""
    first_row: int = 0
    """Number of the first row here among all rows of the site; a rank that holds a part of them has its own."""

    @property
    def threshold(self) -> int:
        """An element is dropped when its 16 random bits are less: the probability is exact to 1/65536."""
        return round(self.probability * 2**16)

    @property
    def scale(self) -> float:
        """The factor of what is kept, 1/(1 − p)."""
        return 1.0 / (1.0 - self.probability)

    def keep(self, rows: int, columns: int, device: torch.device) -> torch.Tensor:
        """Boolean [b, rows, columns], True where the element stays (`engine/kernels/dropout_bits.py`)."""
        bits = implementation("dropout_bits", device.type)(self.keys, self.first_row, rows, columns, device)
        kept: torch.Tensor = bits.to(torch.int32).bitwise_and_(0xFFFF) >= self.threshold
        return kept

    def factors(self, rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """What each element is multiplied with, [b, rows, columns]: 1/(1 − p) where it is kept, else 0."""
        return self.keep(rows, columns, device).to(dtype).mul_(self.scale)


def mask_keys(mask: DropoutMask | None) -> tuple[Array, int, np.int32, np.float32]:
    """A dropout mask as loops take it: keys (none: no dropout), first row, threshold, factor of what is kept.

    The threshold has 32 bits, as have the numbers that a loop works on: wider, it would halve what is done at a time.
    """
    if mask is None:
        return np.empty(0, dtype=np.uint64), 0, np.int32(0), np.float32(1.0)
    return np.array(mask.keys, dtype=np.uint64), mask.first_row, np.int32(mask.threshold), np.float32(mask.scale)
