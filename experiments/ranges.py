"""Numbers that are known between two ends: printed digits, and what follows from them. Imports no
torch."""

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from itertools import product
from typing import Self


@dataclass(frozen=True)
class Range:
    """A number, and the ends between which rounding leaves it; arithmetic takes the farthest
    ends."""

    value: float
    low: float
    high: float

    @classmethod
    def printed(cls, number: Decimal) -> Self:
        """The number as printed: half a unit of its last digit either way."""
        half = Decimal(1).scaleb(int(number.as_tuple().exponent)) / 2
        return cls(float(number), float(number - half), float(number + half))

    def __add__(self, other: "Range | float") -> "Range":
        return _joined(operator.add, self, other)

    def __sub__(self, other: "Range | float") -> "Range":
        return _joined(operator.sub, self, other)

    def __mul__(self, other: "Range | float") -> "Range":
        return _joined(operator.mul, self, other)

    def __truediv__(self, other: "Range | float") -> "Range":
        return _joined(operator.truediv, self, other)

    def __rsub__(self, other: float) -> "Range":
        return _joined(operator.sub, other, self)

    def __rtruediv__(self, other: float) -> "Range":
        return _joined(operator.truediv, other, self)

    __radd__ = __add__
    __rmul__ = __mul__


def as_range(number: Range | float) -> Range:
    """The number as a range, without width if it is a plain one."""
    return number if isinstance(number, Range) else Range(number, number, number)


def farthest(pick: Callable[[Iterable[float]], float], ranges: Iterable[Range]) -> Range:
    """The largest of some ranges, or the least, as `pick` is max or min."""
    every = list(ranges)
    return Range(*(pick(getattr(each, end) for each in every) for end in ("value", "low", "high")))


def _joined(
    operation: Callable[[float, float], float], left: Range | float, right: Range | float
) -> Range:
    a = as_range(left)
    b = as_range(right)
    corners = [operation(*ends) for ends in product((a.low, a.high), (b.low, b.high))]
    return Range(operation(a.value, b.value), min(corners), max(corners))
