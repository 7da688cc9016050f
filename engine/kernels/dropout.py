"""Dropout on the residual stream. Shapes: s sequence, b microbatch, h hidden. Rows of the mask are positions."""

from typing import Any

import numpy as np
import torch

from engine.compiled import BLOCK, Array, Compiled, array, load, random_bits, store
from engine.kernels.dropout_mask import DropoutMask, mask_keys


def reference(x: torch.Tensor, mask: DropoutMask) -> torch.Tensor:
    """x [s, b, h] with dropped elements set to zero and the others multiplied by 1/(1 − p)."""
    s, _, h = x.shape
    return x * mask.factors(s, h, x.device, x.dtype).transpose(0, 1)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: DropoutMask) -> torch.Tensor:
        ctx.mask = mask
        return _dropped(x, mask)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _dropped(gradient, ctx.mask), None


compiled = _Dropout.apply
"""The same in one pass each way. Backward recomputes the mask."""


def _dropped(x: torch.Tensor, mask: DropoutMask) -> torch.Tensor:
    x = x.contiguous()
    output = torch.empty_like(x)
    _drop(array(x), array(output), *mask_keys(mask))
    return output


@Compiled
def _drop(x: Array, output: Array, keys: Array, first_row: int, threshold: np.int32, scale: np.float32) -> None:
    columns = x.shape[2]
    bits = np.empty((columns + BLOCK - 1) // BLOCK * BLOCK, dtype=np.uint16)
    for r in range(x.shape[0]):
        for sample in range(x.shape[1]):
            row, out = x[r, sample], output[r, sample]
            random_bits(keys[sample], first_row + r, columns, bits)
            for i in range(columns):
                keep = scale if np.int32(bits[i]) >= threshold else np.float32(0.0)
                store(out, i, load(row, i) * keep)
