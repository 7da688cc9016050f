"""Dropout masks, and dropout on the residual stream, alone or with bias and addition.

A mask has 16 random bits for each element, and any device can make any part of it. The generator is
Philox 4×32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). Row r of a mask
has blocks of 128 columns. Block k has the counters (16k + lane, r, 0, 0) for 16 lanes. The eight
16-bit pieces of a counter's output, low half first, lie 16 columns apart.

Shapes: s sequence, b microbatch, h hidden. On the residual stream, rows of the mask are positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mlm_repro.engine.compiled import (
    BLOCK,
    LANES,
    PIECES,
    ROWS_TOGETHER,
    Array,
    Compiled,
    array,
    load,
    random_bits,
    store,
)
from mlm_repro.engine.kernels.registry import implementation, kernel, on_gpu

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class DropoutMask:
    """Description of the dropout masks at one site, a point of the model, in a microbatch: the
    probability that an element is dropped, a key for each sequence, and the first row that this
    rank draws. Rows from there on can be drawn from it, as many as the caller asks for."""

    probability: float
    keys: tuple[int, ...] | Tensor
    """One 64-bit key per sequence; a tensor [b] int64 if the keys are on a GPU already."""
    first_row: int = 0
    """Number of the first row that this rank draws, among all rows of the site."""

    @property
    def threshold(self) -> int:
        """Integer p · 2¹⁶, rounded, p the probability of dropout: an element is dropped if its 16
        random bits, read as a number, are below this. The probability is exact to 1/65536."""
        return round(self.probability * 2**16)

    @property
    def scale(self) -> float:
        """Factor of the elements that stay, 1/(1 − p), p the probability of dropout."""
        return 1.0 / (1.0 - self.probability)

    def keep(self, rows: int, columns: int, device: torch.device) -> Tensor:
        """Return a boolean tensor [b, rows, columns] on the device, True if the element stays, for
        `rows` rows of the mask from its attribute `first_row` on."""
        bits = implementation("dropout_bits", device.type)(
            self.keys, self.first_row, rows, columns, device
        )
        # Numbers of 16 bits without a sign, which torch stores as int16.
        return bits.to(torch.int32).bitwise_and_(0xFFFF) >= self.threshold

    def factors(self, rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return a tensor [b, rows, columns] of dtype `dtype` on the device, the factor of each
        element, for `rows` rows of the mask from its attribute `first_row` on: 1/(1 − p) if the
        element stays, else 0."""
        return self.keep(rows, columns, device).to(dtype).mul_(self.scale)


def keys_on(keys: Sequence[int | tuple[int, ...]] | Tensor, device: torch.device) -> Tensor:
    """Return dropout keys, numbers or equally long tuples of numbers, as an int64 tensor [b] or [b,
    …] on the device; the host does not wait for a GPU's copy. A tensor is returned as it is,
    wherever it is."""
    if isinstance(keys, Tensor):
        return keys
    # Only a copy from page-locked memory runs beside the host.
    return torch.tensor(keys, dtype=torch.int64, pin_memory=device.type == "cuda").to(
        device, non_blocking=True
    )


def mask_keys(mask: DropoutMask | None) -> tuple[Array, int, np.int32, np.float32]:
    """Return a dropout mask as a tuple of four arguments of a compiled loop: keys as a uint64 array
    [b], first row, threshold, scale. If `mask` is None, the keys are empty, and the other three
    drop nothing. The keys must not be on a GPU."""
    if mask is None:
        return np.empty(0, dtype=np.uint64), 0, np.int32(0), np.float32(1.0)
    return (
        np.asarray(mask.keys, dtype=np.uint64),
        mask.first_row,
        # 32 bits like the numbers in the loop: a threshold of 64 would halve the vectors, and made
        # the softmax half as long again.
        np.int32(mask.threshold),
        np.float32(mask.scale),
    )


def reference_bits(
    keys: tuple[int, ...] | Tensor,
    first_row: int,
    rows: int,
    columns: int,
    device: torch.device,
) -> Tensor:
    """Return 16 random bits for each element of the dropout masks with these keys, as an int16
    tensor [len(keys), rows, columns] on the device, starting at the mask's row `first_row`."""
    blocks = -(-columns // BLOCK)
    counters = torch.arange(blocks * LANES, device=device)
    row_numbers = torch.arange(first_row, first_row + rows, device=device)
    pieces = [philox(counters.expand(rows, -1), row_numbers.unsqueeze(1), key) for key in keys]
    words = torch.stack(
        [torch.stack(outputs, dim=-1) for outputs in pieces]
    )  # [b, rows, blocks·16, 4]
    halves = torch.stack([words & 0xFFFF, words >> 16], dim=-1).view(
        len(keys), rows, blocks, LANES, PIECES
    )
    bits = halves.transpose(-1, -2).reshape(len(keys), rows, blocks * BLOCK)[..., :columns]
    # torch has few operations on unsigned 16 bits, so the upper half becomes negative.
    return torch.where(bits < 2**15, bits, bits - 2**16).to(torch.int16)


def philox(c0: Tensor, c1: Tensor, key: int | Tensor) -> list[Tensor]:
    """Return the random bits of Philox 4×32-10 for the counters (c0, c1, 0, 0) under a key of 64
    bits: a list of four int64 tensors in the shape of c0, each with words of 32 bits, from 0 to
    2³² − 1. The counters are int64 tensors with words of 32 bits; narrower ones would overflow. c1
    is expanded to the shape of c0. A key in a tensor is int64 and not negative."""
    words = [c0, c1.expand_as(c0), torch.zeros_like(c0), torch.zeros_like(c0)]
    low = key & LOW
    high = key >> 32
    for _ in range(ROUNDS):
        first = words[0] * MULTIPLIERS[0]
        second = words[2] * MULTIPLIERS[1]
        words = [
            # A product may reach the sign of int64, which the mask takes off again.
            ((second >> 32) & LOW) ^ words[1] ^ low,
            second & LOW,
            ((first >> 32) & LOW) ^ words[3] ^ high,
            first & LOW,
        ]
        low = (low + WEYL[0]) & LOW
        high = (high + WEYL[1]) & LOW
    return words


def compiled_bits(
    keys: tuple[int, ...], first_row: int, rows: int, columns: int, device: torch.device
) -> Tensor:
    """Return 16 random bits for each element of the dropout masks with these keys, as an int16
    tensor [len(keys), rows, columns] on a CPU, starting at the mask's row `first_row`. A compiled
    loop makes them, the same as `reference_bits`."""
    blocks = -(-columns // BLOCK)
    bits = torch.empty(len(keys), rows, blocks * BLOCK, dtype=torch.int16, device=device)
    _fill(np.asarray(keys, dtype=np.uint64), first_row, array(bits).view(np.uint16))
    return bits[..., :columns]


@Compiled
def _fill(keys: Array, first_row: int, bits: Array) -> None:
    for sample in range(bits.shape[0]):
        for row in range(bits.shape[1]):
            random_bits(keys[sample], first_row + row, bits.shape[2], bits[sample, row])


def reference(x: Tensor, mask: DropoutMask) -> Tensor:
    """Return a new tensor, x [s, b, h] with the elements that `mask` drops set to zero and the
    others multiplied by 1/(1 − p), p the mask's probability. The mask has a key for each of the b
    sequences; row `mask.first_row` + i of a sequence's mask is for its position i in x."""
    s, _, h = x.shape
    return x * mask.factors(s, h, x.device, x.dtype).transpose(0, 1)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: DropoutMask) -> Tensor:
        ctx.mask = mask
        return _dropped(x, mask)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _dropped(gradient, ctx.mask), None


compiled = _Dropout.apply
"""Differentiable function (x [s, b, h], DropoutMask) → x on a CPU with dropped elements set to zero
and the others multiplied by 1/(1 − p), p the mask's probability: a new tensor, in one pass each
way. Backward recomputes the mask."""


def _dropped(x: Tensor, mask: DropoutMask) -> Tensor:
    x = x.contiguous()
    output = torch.empty_like(x)
    _drop(array(x), array(output), *mask_keys(mask))
    return output


@Compiled
def _drop(
    x: Array, output: Array, keys: Array, first_row: int, threshold: np.int32, scale: np.float32
) -> None:
    columns = x.shape[2]
    bits = np.empty((columns + BLOCK - 1) // BLOCK * BLOCK, dtype=np.uint16)
    for r in range(x.shape[0]):
        for sample in range(x.shape[1]):
            row = x[r, sample]
            out = output[r, sample]
            random_bits(keys[sample], first_row + r, columns, bits)
            for i in range(columns):
                keep = scale if np.int32(bits[i]) >= threshold else np.float32(0.0)
                store(out, i, load(row, i) * keep)


def bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor, mask: DropoutMask | None) -> Tensor:
    """Return residual + dropout(x + bias), a new tensor [s, b, h], for x and residual [s, b, h] and
    bias [h] (2021 paper, Section 4.2). `mask` is a DropoutMask of probability p: the elements that
    it keeps are multiplied by 1/(1 − p); if it is None, nothing is dropped."""
    branch = x + bias
    return residual + (branch if mask is None else reference(branch, mask))


def add_norm(
    x: Tensor,
    weight: Tensor,
    shift: Tensor,
    branch: Tensor | None,
    bias: Tensor | None,
    mask: DropoutMask | None,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """Return a pair of tensors [s, b, h]: the sum x + dropout(branch + bias), and the layer norm of
    this sum with scale `weight` [h], bias `shift` [h] and the number `epsilon`, which is added to
    the variance. A branch needs its `bias` [h]; if `branch` is None, the sum is x itself and `bias`
    is ignored. If `mask` is None, nothing is dropped."""
    added = x if branch is None else kernel("bias_dropout_add", x)(branch, bias, x, mask)
    return added, F.layer_norm(added, weight.shape, weight, shift, epsilon)


def normed_sum(
    norm: torch.nn.Module,
    x: Tensor,
    branch: Tensor | None = None,
    bias: Tensor | None = None,
    mask: DropoutMask | None = None,
) -> tuple[Tensor, Tensor]:
    """Return a pair of tensors [s, b, h]: the sum x + dropout(branch + bias), which is x itself if
    `branch` is None, and the module `norm` applied to this sum. x and branch are [s, b, h]; a
    branch needs its bias [h]. If `mask` is None, nothing is dropped.

    On a GPU one kernel can compute both tensors, and one more their gradients, if the norm is
    torch's LayerNorm itself and has no forward hook. In that case the module is not called, and so
    its hooks of other kinds are not called.
    """
    # The kernel computes LayerNorm and no subclass of it. It does not call the module, so hooks
    # would see nothing.
    if type(norm) is torch.nn.LayerNorm and on_gpu(x.device) and not norm._forward_hooks:
        return kernel("add_norm", x)(x, norm.weight, norm.bias, branch, bias, mask, norm.eps)
    added = x if branch is None else kernel("bias_dropout_add", branch)(branch, bias, x, mask)
    return added, norm(added)


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor,
        residual: Tensor,
        mask: DropoutMask | None,
    ) -> Tensor:
        ctx.mask = mask
        ctx.bias_dtype = bias.dtype
        x = x.contiguous()
        residual = residual.contiguous()
        output = torch.empty_like(x)
        _add(array(x), array(bias.contiguous()), array(residual), array(output), *mask_keys(mask))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        gradient = gradient.contiguous()
        # Without dropout x's gradient is the output's, and nothing is written.
        to_x = gradient if ctx.mask is None else torch.empty_like(gradient)
        to_bias = torch.zeros(gradient.size(-1))
        _gradient(array(gradient), array(to_x), array(to_bias), *mask_keys(ctx.mask))
        return to_x, to_bias.to(ctx.bias_dtype), gradient, None


compiled_bias_dropout_add = _BiasDropoutAdd.apply
"""Differentiable function (x [s, b, h], bias [h], residual [s, b, h], DropoutMask or None) →
residual + dropout(x + bias), a new tensor, on a CPU, in one pass each way. No tensor is kept:
backward recomputes the mask."""


@Compiled
def _add(
    x: Array,
    bias: Array,
    residual: Array,
    output: Array,
    keys: Array,
    first_row: int,
    threshold: np.int32,
    scale: np.float32,
) -> None:
    columns = x.shape[2]
    bits = np.empty((columns + BLOCK - 1) // BLOCK * BLOCK, dtype=np.uint16)
    for r in range(x.shape[0]):
        for sample in range(x.shape[1]):
            row = x[r, sample]
            before = residual[r, sample]
            out = output[r, sample]
            if keys.size == 0:
                for i in range(columns):
                    store(out, i, load(before, i) + (load(row, i) + load(bias, i)))
            else:
                random_bits(keys[sample], first_row + r, columns, bits)
                for i in range(columns):
                    keep = scale if np.int32(bits[i]) >= threshold else np.float32(0.0)
                    # In the order of the reference, branch and bias first, so that both round
                    # alike.
                    store(out, i, load(before, i) + (load(row, i) + load(bias, i)) * keep)


@Compiled
def _gradient(
    gradient: Array,
    to_x: Array,
    to_bias: Array,
    keys: Array,
    first_row: int,
    threshold: np.int32,
    scale: np.float32,
) -> None:
    """Write the gradient of x to `to_x` [s, b, h] and add the bias's gradient to `to_bias` [h],
    from `gradient` [s, b, h], the gradient of residual + dropout(x + bias). The last four arguments
    are the mask as `mask_keys` gives it; if `keys` is empty, nothing was dropped and `to_x` is not
    written."""
    columns = gradient.shape[2]
    bits = np.empty((columns + BLOCK - 1) // BLOCK * BLOCK, dtype=np.uint16)
    part = np.zeros(columns, dtype=np.float32)
    rows = 0
    for r in range(gradient.shape[0]):
        for sample in range(gradient.shape[1]):
            row = gradient[r, sample]
            out = to_x[r, sample]
            if keys.size == 0:
                for i in range(columns):
                    part[i] += load(row, i)
            else:
                random_bits(keys[sample], first_row + r, columns, bits)
                for i in range(columns):
                    keep = scale if np.int32(bits[i]) >= threshold else np.float32(0.0)
                    value = load(row, i) * keep
                    store(out, i, value)
                    part[i] += value
            rows += 1
            # Sums of few rows first, because one long fp32 sum rounds more.
            if rows % ROWS_TOGETHER == 0 or rows == gradient.shape[0] * gradient.shape[1]:
                for i in range(columns):
                    to_bias[i] += part[i]
                    part[i] = np.float32(0.0)
