"""The mask of one dropout site, described by keys. Kernels compute its bits where they need them."""

from dataclasses import dataclass

import numpy as np
import torch

from engine.compiled import Array
from engine.kernels.registry import implementation


@dataclass(frozen=True)
class DropoutMask:
    """Dropout mask of one site, for each sequence of a microbatch."""

    probability: float
    keys: tuple[int, ...]
    """One key per sequence."""
    first_row: int = 0
    """Number of this rank's first row among all rows of the site."""

    @property
    def threshold(self) -> int:
        """Elements with smaller random bits are dropped. The probability is exact to 1/65536."""
        return round(self.probability * 2**16)

    @property
    def scale(self) -> float:
        """Factor of the elements that stay, 1/(1 − p)."""
        return 1.0 / (1.0 - self.probability)

    def keep(self, rows: int, columns: int, device: torch.device) -> torch.Tensor:
        """Boolean [b, rows, columns], True if the element stays (`engine/kernels/dropout_bits.py`)."""
        bits = implementation("dropout_bits", device.type)(self.keys, self.first_row, rows, columns, device)
        stays: torch.Tensor = bits.to(torch.int32).bitwise_and_(0xFFFF) >= self.threshold
        return stays

    def factors(self, rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Factor of each element, [b, rows, columns]: 1/(1 − p) if it stays, else 0."""
        return self.keep(rows, columns, device).to(dtype).mul_(self.scale)


def mask_keys(mask: DropoutMask | None) -> tuple[Array, int, np.int32, np.float32]:
    """A dropout mask as arguments of a loop: keys (empty without dropout), first row, threshold, scale.

    The threshold has 32 bits like the numbers in the loop. A wider one would halve the vector length.
    """
    if mask is None:
        return np.empty(0, dtype=np.uint64), 0, np.int32(0), np.float32(1.0)
    return np.array(mask.keys, dtype=np.uint64), mask.first_row, np.int32(mask.threshold), np.float32(mask.scale)
