"""Numbers that stand in a quotation, in digits or in words."""

import re
from decimal import Decimal

DIGITS = re.compile(r"(?<![\w.])-?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)")
WORDS = {
    "a billion": 1,
    "once": 1,
    "two": 2,
    "four": 4,
    "zero": 0,
    "a quarter": 0.25,
    "same": 1,
    "no additional": 1,
    "equally": 1,
    "regardless of": 1,
    "is bsh": 1,
    "= L layers": 1,
    "maintain": 0,
    "nearly identical": 0,
}
"""Words that say a number; ones like same say a ratio of 1 or a difference of 0."""


def numbers(words: str) -> list[Decimal]:
    """The numbers of the quotation in order, then those that it says in words."""
    digits = [
        Decimal(each.replace(",", ""))
        for each in DIGITS.findall(words.replace("−", "-").replace("×", " "))
    ]
    return digits + [Decimal(str(value)) for word, value in WORDS.items() if word in words]
