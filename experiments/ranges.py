"""Arithmetic on numbers that are known within rounding: printed digits, and values computed from
them. Imports no torch."""

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from itertools import product, starmap
from typing import Self


@dataclass(frozen=True)
class Range:
    """A number with the lowest and the highest value that rounding allows. Arithmetic returns the
    widest range."""

    value: float
    low: float
    high: float

    @classmethod
    def printed(cls, number: Decimal) -> Self:
        """Return the range of a printed number: half a unit of its last digit either way."""
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
    """Return the number as a range; a plain number becomes one without width."""
    return number if isinstance(number, Range) else Range(number, number, number)


def farthest(pick: Callable[[Iterable[float]], float], ranges: Iterable[Range]) -> Range:
    """Return the largest of some ranges if `pick` is max, the smallest if it is min. Value and ends
    are picked separately."""
    every = list(ranges)
    return Range(
        *(pick(getattr(number, end) for number in every) for end in ("value", "low", "high"))
    )


def _joined(
    operation: Callable[[float, float], float], left: Range | float, right: Range | float
) -> Range:
    a = as_range(left)
    b = as_range(right)
    corners = list(starmap(operation, product((a.low, a.high), (b.low, b.high))))
    return Range(operation(a.value, b.value), min(corners), max(corners))
