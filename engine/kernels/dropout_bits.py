"""Random bits of dropout masks, 16 for each element. Any device can make any part of a mask.

The generator is Philox 4×32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). Row r of a mask has
blocks of 128 columns. Block k has the counters (16k + lane, r, 0, 0) for 16 lanes. The eight 16-bit pieces of a
counter's output, low half first, lie 16 columns apart.
"""

import numpy as np
import torch

from engine.compiled import BLOCK, LANES, PIECES, Array, Compiled, array, random_bits

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
LOW = 0xFFFFFFFF


def reference(
    keys: tuple[int, ...], first_row: int, rows: int, columns: int, device: torch.device
) -> torch.Tensor:  # fmt: skip
    """Random bits as int16, [len(keys), rows, columns], starting at row `first_row`."""
    blocks = -(-columns // BLOCK)
    counters = torch.arange(blocks * LANES, device=device)
    row_numbers = torch.arange(first_row, first_row + rows, device=device)
    pieces = [philox(counters.expand(rows, -1), row_numbers.unsqueeze(1), key) for key in keys]
    words = torch.stack([torch.stack(outputs, dim=-1) for outputs in pieces])  # [b, rows, blocks·16, 4]
    halves = torch.stack([words & 0xFFFF, words >> 16], dim=-1).view(len(keys), rows, blocks, LANES, PIECES)
    bits = halves.transpose(-1, -2).reshape(len(keys), rows, blocks * BLOCK)[..., :columns]
    return torch.where(bits < 2**15, bits, bits - 2**16).to(torch.int16)


def philox(c0: torch.Tensor, c1: torch.Tensor, key: int) -> list[torch.Tensor]:
    """Four 32-bit words, in int64, for counters (c0, c1, 0, 0)."""
    words = [c0, c1.expand_as(c0), torch.zeros_like(c0), torch.zeros_like(c0)]
    low, high = key & LOW, key >> 32
    for _ in range(ROUNDS):
        first, second = words[0] * MULTIPLIERS[0], words[2] * MULTIPLIERS[1]
        words = [
            ((second >> 32) & LOW) ^ words[1] ^ low,
            second & LOW,
            ((first >> 32) & LOW) ^ words[3] ^ high,
            first & LOW,
        ]
        low, high = (low + WEYL[0]) & LOW, (high + WEYL[1]) & LOW
    return words


def compiled(
    keys: tuple[int, ...], first_row: int, rows: int, columns: int, device: torch.device
) -> torch.Tensor:  # fmt: skip
    """The same bits from a compiled loop."""
    blocks = -(-columns // BLOCK)
    bits = torch.empty(len(keys), rows, blocks * BLOCK, dtype=torch.int16, device=device)
    _fill(np.array(keys, dtype=np.uint64), first_row, array(bits).view(np.uint16))
    return bits[..., :columns]


@Compiled
def _fill(keys: Array, first_row: int, bits: Array) -> None:
    for sample in range(bits.shape[0]):
        for row in range(bits.shape[1]):
            random_bits(keys[sample], first_row + row, bits.shape[2], bits[sample, row])
