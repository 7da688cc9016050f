"""Arithmetic on numbers that are known within rounding: printed digits, and values computed from
them. Imports no torch."""

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from functools import partialmethod
from itertools import product, starmap
from typing import Self


@dataclass(frozen=True)
class Range:
    """A number with the lowest and the highest value that rounding allows. Sums, differences,
    products and quotients of ranges and plain numbers are ranges, as wide as the ends allow; a
    range with 0 between its ends may not be a divisor, which is not checked."""

    value: float
    low: float
    high: float

    @classmethod
    def printed(cls, number: Decimal) -> Self:
        """Return the Range of a printed number, a Decimal with the digits that were printed: the
        number as `value`, and `low` and `high` half a unit of its last digit below and above it,
        all floats."""
        half = Decimal(1).scaleb(int(number.as_tuple().exponent)) / 2
        return cls(float(number), float(number - half), float(number + half))

    def _joined(
        self, operation: Callable[[float, float], float], other: "Range | float"
    ) -> "Range":
        """Return the Range of an operation on this number and `other`, a Range or a plain number:
        the operation on both values, and its least and greatest result at the ends of both
        ranges."""
        b = as_range(other)
        corners = list(starmap(operation, product((self.low, self.high), (b.low, b.high))))
        return Range(operation(self.value, b.value), min(corners), max(corners))

    __add__ = __radd__ = partialmethod(_joined, operator.add)
    __mul__ = __rmul__ = partialmethod(_joined, operator.mul)
    __sub__ = partialmethod(_joined, operator.sub)
    __truediv__ = partialmethod(_joined, operator.truediv)

    def __rsub__(self, other: float) -> "Range":
        return as_range(other) - self

    def __rtruediv__(self, other: float) -> "Range":
        return as_range(other) / self


def as_range(number: Range | float) -> Range:
    """Return `number` as a Range; a plain number becomes one without width."""
    return number if isinstance(number, Range) else Range(number, number, number)


def farthest(pick: Callable[[Iterable[float]], float], ranges: Iterable[Range]) -> Range:
    """Return a new Range: its value, low end and high end are each the largest among the `ranges`,
    which must not be empty, if `pick` is max, and the smallest if `pick` is min."""
    every = list(ranges)
    return Range(
        *(pick(getattr(number, end) for number in every) for end in ("value", "low", "high"))
    )
