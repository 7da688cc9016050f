"""Dropout masks inside Triton kernels, with the bits of `engine/kernels/dropout.py`.

Shapes: r rows of a mask in a tile, c blocks of 128 columns in a tile.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from mlm_repro.engine.kernels.dropout import DropoutMask, keys_on

Context = Any
"""Type of autograd's context, in which a forward pass keeps what its backward pass needs."""
BLOCK = 128
"""Number of columns in a block of a dropout mask, whose random bits come from 16 counters."""


def warps(columns: int) -> int:
    """Return the number of warps for a Triton program that holds a whole row of `columns` numbers
    in registers: one for each 256 columns, rounded up to a power of two, from 1 to 16."""
    return min(max(triton.next_power_of_2(columns) // 256, 1), 16)


@triton.jit
def _words(keys, rows, block, c: tl.constexpr):
    """Return a tuple of four tensors [r, 16·c], the four words of 32 random bits of each of a row's
    counters: 16 counters for each of `c` blocks of columns, from block `block` on. `rows`, the
    mask's row numbers, and `keys`, their dropout keys, are [r]."""
    lanes = (block * 16 + tl.arange(0, 16 * c))[None, :].to(tl.uint32)
    zero = lanes * 0
    low = keys[:, None].to(tl.uint32)
    high = (keys[:, None] >> 32).to(tl.uint32)
    return tl.philox_impl(lanes, rows[:, None].to(tl.uint32), zero, zero, low, high, 10)


@triton.jit
def _halves(word, threshold):
    return tl.join((word & 0xFFFF) >= threshold, (word >> 16) >= threshold)


@triton.jit
def stays(keys, rows, block, threshold, r: tl.constexpr, c: tl.constexpr):
    """Return a boolean tensor [r, 128·c], True where an element is not dropped, because its 16
    random bits are not below `threshold`, for the mask's rows `rows` [r] with their dropout keys
    `keys` [r], from column 128·`block` on."""
    w0, w1, w2, w3 = _words(keys, rows, block, c)
    even = tl.join(_halves(w0, threshold), _halves(w2, threshold))
    odd = tl.join(_halves(w1, threshold), _halves(w3, threshold))
    # Joined dims come last: row, block, lane, half, word // 2, word % 2. Columns of a block are in
    # the order word, half, lane.
    pieces = tl.reshape(tl.join(even, odd), [r, c, 16, 2, 2, 2])
    return tl.reshape(tl.permute(pieces, [0, 1, 4, 5, 3, 2]), [r, 128 * c])


@triton.jit
def _bits(word, threshold, power: tl.constexpr):
    return ((word & 0xFFFF) >= threshold).to(tl.uint8) << power | ((word >> 16) >= threshold).to(
        tl.uint8
    ) << power + 1


@triton.jit
def packed(keys, rows, block, threshold):
    """Return 128 columns of a dropout mask as bytes [r, 16], for the mask's rows `rows` [r] with
    their dropout keys `keys` [r]. Bit j of byte l is 1 if column 128·`block` + 16·j + l is not
    dropped, because its 16 random bits are not below `threshold`."""
    w0, w1, w2, w3 = _words(keys, rows, block, 1)
    return (
        _bits(w0, threshold, 0)
        | _bits(w1, threshold, 2)
        | _bits(w2, threshold, 4)
        | _bits(w3, threshold, 6)
    )


def mask_arguments(
    mask: DropoutMask | None, device: torch.device
) -> tuple[torch.Tensor, int, int, float]:
    """Return a dropout mask as a tuple of four arguments of a Triton kernel: keys, an int64 tensor
    [b] on the device, first row, threshold, scale. If `mask` is None, the keys are empty, and the
    other three drop nothing."""
    if mask is None:
        return torch.empty(0, dtype=torch.int64, device=device), 0, 0, 1.0
    return keys_on(mask.keys, device), mask.first_row, mask.threshold, mask.scale
