"""Tolerance for two engines that compute the same: how far rounding takes one of them. Imports no torch.

The reference is run again, `DRAWS` times. Before every iteration of such a run each weight w becomes w(1 + δ), with δ
drawn evenly from ± u, the unit round-off of the weights' number format (Monte Carlo arithmetic: Parker 1997, UCLA
CSD-970002). The spread S of a number, or of a tensor's elements, is the largest distance of these runs from the first.
Two engines may then differ by

    T = TAIL · √R · (S + u₃₂ · |x|) + 2u · |x|,    R = 2 · (8L + 4)

R is the number of roundings in a row, from the input to the loss and back, in a network of L layers: two layer norms,
four products and two additions per layer; an embedding, a layer norm, a product and the loss. The spread has one of
these roundings, and independent ones add up as √R (Higham & Mary 2019, SIAM J. Sci. Comput. 41). TAIL is needed because
`DRAWS` runs show the width of a distribution and not its end. |x| is the largest element, u₃₂ the unit round-off of
fp32. The last term is for the format of x itself: two nearly equal values may be rounded to neighbours. Over iterations
S is the largest so far, because differences grow.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

DRAWS = 4
TAIL = 4.0
UNIT_FP32 = 2.0**-24
FORMULA = "T = 4·√(2(8L + 4))·(S + 2⁻²⁴·|x|) + 2u·|x|"
HELD_IN_BF16 = ("output of ", "gradient of output of ", "updated ")
"""Beginnings of the names of tensors that a bf16 run holds in bf16. All others are in fp32."""


def factor(num_layers: int) -> float:
    """TAIL · √R."""
    return TAIL * math.sqrt(2 * (8 * num_layers + 4))


def tensor_tolerance(
    tensor: str, first: ArrayLike, draws: Sequence[ArrayLike], num_layers: int, precision: str
) -> float:
    """T of a tensor, from the reference's value and those of its perturbed runs."""
    base = np.asarray(first, np.float64)
    spread = max((float(np.abs(np.asarray(draw, np.float64) - base).max()) for draw in draws if base.size), default=0.0)
    unit = 2.0**-8 if precision == "bf16" and tensor.startswith(HELD_IN_BF16) else UNIT_FP32
    size = float(np.abs(base).max(initial=0.0))
    return factor(num_layers) * (spread + UNIT_FP32 * size) + 2 * unit * size


def curve_tolerance(first: ArrayLike, draws: Sequence[ArrayLike], num_layers: int) -> list[float]:
    """T of each number of an fp32 curve over iterations."""
    base = np.asarray(first, np.float64)
    spread = np.max([np.abs(np.asarray(draw, np.float64) - base) for draw in draws], axis=0)
    size = UNIT_FP32 * np.abs(base)
    allowed = factor(num_layers) * (np.maximum.accumulate(spread) + size) + 2 * size
    return [float(value) for value in allowed]
