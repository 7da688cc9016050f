"""Dropout masks inside Triton kernels, with the bits of `engine/kernels/dropout.py`.

Shapes: r rows of a mask in a tile, c blocks of 128 columns in a tile.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from mlm_repro.engine.kernels.dropout import DropoutMask, keys_on

Context = Any
"""Autograd's context."""
BLOCK = 128
"""Columns of a random row that come from 16 counters."""


def warps(columns: int) -> int:
    """Number of warps for a program that holds a whole row in registers."""
    return min(max(triton.next_power_of_2(columns) // 256, 1), 16)


@triton.jit
def random_words(keys, rows, block, c: tl.constexpr):
    """Four 32-bit words for each of a row's 16·c counters, each [r, 16·c], from keys and rows [r]."""
    lanes = (block * 16 + tl.arange(0, 16 * c))[None, :]
    first = (lanes + rows[:, None] * 0).to(tl.uint32)
    second = (rows[:, None] + lanes * 0).to(tl.uint32)
    low = (keys[:, None] + lanes * 0).to(tl.uint32)
    high = ((keys[:, None] >> 32) + lanes * 0).to(tl.uint32)
    zero = first * 0
    return tl.philox_impl(first, second, zero, zero, low, high, 10)


@triton.jit
def in_columns(w0l, w0h, w1l, w1h, w2l, w2h, w3l, w3h, r: tl.constexpr, c: tl.constexpr):
    """Join eight pieces [r, 16·c] into [r, 128·c]. The pieces of one counter lie 16 columns apart."""
    even = tl.join(tl.join(w0l, w0h), tl.join(w2l, w2h))  # [r, 16·c, half, word // 2]
    odd = tl.join(tl.join(w1l, w1h), tl.join(w3l, w3h))
    pieces = tl.reshape(tl.join(even, odd), [r, c, 16, 2, 2, 2])
    return tl.reshape(tl.permute(pieces, [0, 1, 4, 5, 3, 2]), [r, 128 * c])


@triton.jit
def stays(keys, rows, block, threshold, r: tl.constexpr, c: tl.constexpr):
    """True where an element stays, [r, 128·c], for rows [r] with keys [r], starting at column 128·`block`."""
    w0, w1, w2, w3 = random_words(keys, rows, block, c)
    return in_columns(
        (w0 & 0xFFFF) >= threshold, (w0 >> 16) >= threshold, (w1 & 0xFFFF) >= threshold, (w1 >> 16) >= threshold,
        (w2 & 0xFFFF) >= threshold, (w2 >> 16) >= threshold, (w3 & 0xFFFF) >= threshold, (w3 >> 16) >= threshold,
        r, c,
    )  # fmt: skip


@triton.jit
def packed(keys, rows, block, threshold):
    """Bytes [r, 16] for rows [r] with keys [r]. Bit j of byte l is 1 if column 128·`block` + 16·j + l stays."""
    w0, w1, w2, w3 = random_words(keys, rows, block, 1)
    byte = ((w0 & 0xFFFF) >= threshold).to(tl.uint8) | ((w0 >> 16) >= threshold).to(tl.uint8) << 1
    byte |= ((w1 & 0xFFFF) >= threshold).to(tl.uint8) << 2 | ((w1 >> 16) >= threshold).to(tl.uint8) << 3
    byte |= ((w2 & 0xFFFF) >= threshold).to(tl.uint8) << 4 | ((w2 >> 16) >= threshold).to(tl.uint8) << 5
    return byte | ((w3 & 0xFFFF) >= threshold).to(tl.uint8) << 6 | ((w3 >> 16) >= threshold).to(tl.uint8) << 7


def mask_arguments(mask: DropoutMask | None, device: torch.device) -> tuple[torch.Tensor, int, int, float]:
    """A dropout mask as arguments of a kernel: keys int64 (empty without dropout), first row, threshold, scale."""
    if mask is None:
        return torch.empty(0, dtype=torch.int64, device=device), 0, 0, 1.0
    return keys_on(mask.keys, device), mask.first_row, mask.threshold, mask.scale
