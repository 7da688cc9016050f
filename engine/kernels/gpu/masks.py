"""Dropout masks made inside a kernel: the bits of `engine.kernels.dropout_bits`, element for element.

Shapes: r rows of a mask in a tile, c blocks of 128 columns in a tile.
"""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from engine.kernels.dropout_mask import DropoutMask

Context = Any
"""What autograd keeps between the passes."""
BLOCK = 128
"""Columns of a random row that come from 16 counters."""


def warps(columns: int) -> int:
    """Warps of a program that has a whole row in its registers."""
    return min(max(triton.next_power_of_2(columns) // 256, 1), 16)


@triton.jit
def random_words(keys, rows, block, c: tl.constexpr):
    """Four words of 32 bits for each of the 16·c counters of every row, [r, 16·c], from keys and rows [r]."""
    lanes = (block * 16 + tl.arange(0, 16 * c))[None, :]
    first = (lanes + rows[:, None] * 0).to(tl.uint32)
    second = (rows[:, None] + lanes * 0).to(tl.uint32)
    low = (keys[:, None] + lanes * 0).to(tl.uint32)
    high = ((keys[:, None] >> 32) + lanes * 0).to(tl.uint32)
    zero = first * 0
    return tl.philox_impl(first, second, zero, zero, low, high, 10)


@triton.jit
def in_columns(w0l, w0h, w1l, w1h, w2l, w2h, w3l, w3h, r: tl.constexpr, c: tl.constexpr):
    """Eight pieces [r, 16·c], in the order of their columns, as [r, 128·c]: a counter's lie 16 columns apart."""
    even = tl.join(tl.join(w0l, w0h), tl.join(w2l, w2h))  # [r, 16·c, half, word // 2]
    odd = tl.join(tl.join(w1l, w1h), tl.join(w3l, w3h))
    pieces = tl.reshape(tl.join(even, odd), [r, c, 16, 2, 2, 2])
    return tl.reshape(tl.permute(pieces, [0, 1, 4, 5, 3, 2]), [r, 128 * c])


@triton.jit
def kept(keys, rows, block, threshold, r: tl.constexpr, c: tl.constexpr):
    """True where an element stays, [r, 128·c], of rows [r] with keys [r], from column 128·`block` on."""
    w0, w1, w2, w3 = random_words(keys, rows, block, c)
    return in_columns(
        (w0 & 0xFFFF) >= threshold, (w0 >> 16) >= threshold, (w1 & 0xFFFF) >= threshold, (w1 >> 16) >= threshold,
        (w2 & 0xFFFF) >= threshold, (w2 >> 16) >= threshold, (w3 & 0xFFFF) >= threshold, (w3 >> 16) >= threshold,
        r, c,
    )  # fmt: skip


@triton.jit
def packed(keys, rows, block, threshold):
    """Bytes [r, 16]: bit j of byte l says whether column 128·`block` + 16·j + l stays, of rows [r] with keys [r]."""
    w0, w1, w2, w3 = random_words(keys, rows, block, 1)
    byte = ((w0 & 0xFFFF) >= threshold).to(tl.uint8) | ((w0 >> 16) >= threshold).to(tl.uint8) << 1
    byte |= ((w1 & 0xFFFF) >= threshold).to(tl.uint8) << 2 | ((w1 >> 16) >= threshold).to(tl.uint8) << 3
    byte |= ((w2 & 0xFFFF) >= threshold).to(tl.uint8) << 4 | ((w2 >> 16) >= threshold).to(tl.uint8) << 5
    return byte | ((w3 & 0xFFFF) >= threshold).to(tl.uint8) << 6 | ((w3 >> 16) >= threshold).to(tl.uint8) << 7


def mask_arguments(mask: "DropoutMask | None", device: torch.device) -> tuple[torch.Tensor, int, int, float]:
    """A dropout mask as kernels take it: keys int64 (none: no dropout), first row, threshold, factor of what is kept.

    On a GPU the keys go there without the host's waiting for it.
    """
    if mask is None:
        return torch.empty(0, dtype=torch.int64, device=device), 0, 0, 1.0
    keys = torch.tensor(mask.keys, dtype=torch.int64, pin_memory=device.type == "cuda")
    return keys.to(device, non_blocking=True), mask.first_row, mask.threshold, mask.scale
