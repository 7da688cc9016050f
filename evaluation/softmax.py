"""What a row of logits adds up to, which a softmax divides by; on a CPU in one pass through memory."""

import numpy as np
import torch
from torch import Tensor

from engine.compiled import Array, Compiled, array, exponential, largest, load
from engine.kernels.registry import DTYPES

TOGETHER = 1024
"""Exponentials that are added in float32 before they join a float64 sum."""


def sum_exponentials(logits: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Of the columns of each row of logits [n, v]: the highest, in float32, and the sum of e to the power of each less
    the highest, in float64; both [n], and −∞ and 0 of no columns.
    """
    n, count = len(logits), columns.stop - columns.start
    highest, total = logits.new_full((n,), float("-inf"), dtype=torch.float32), logits.new_zeros(n, dtype=torch.float64)
    if count <= 0:
        return highest, total
    if logits.device.type != "cpu":
        some = logits[:, columns].float()
        highest = some.amax(dim=1)
        return highest, (some - highest[:, None]).exp_().sum(dim=1, dtype=torch.float64)
    logits = logits.contiguous() if logits.dtype in DTYPES["cpu"] else logits.float().contiguous()
    _sum_exponentials(array(logits), columns.start, count, array(highest), array(total))
    return highest, total


@Compiled
def _sum_exponentials(logits: Array, start: int, count: int, highest: Array, total: Array) -> None:
    for r in range(logits.shape[0]):
        row = logits[r, start : start + count]
        most = largest(row, count)
        whole = np.float64(0.0)
        for first in range(0, count, TOGETHER):
            some = row[first : first + TOGETHER]
            part = np.float32(0.0)
            for i in range(some.size):
                part += exponential(load(some, i) - most)
            whole += part
        highest[r], total[r] = most, whole
