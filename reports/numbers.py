"""Numbers as text on the page and in figures."""

from lineage.numbers import MISSING
from lineage.numbers import show as show


def exact(value: float | int | None) -> str:
    """The number as recorded, without a trailing `.0`."""
    if value is None:
        return ""
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)


def compact(value: float) -> str:
    """A short number for ticks: `1,500`, `150k`, `2.5M`."""
    for limit, letter in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):g}{letter}"
    return f"{value:,g}"


def percent(part: float, whole: float) -> str:
    """A share in per cent; an em dash if the whole is 0."""
    return f"{100 * part / whole:.1f} %" if whole else MISSING


def printable(text: object) -> str:
    """The text with visible control characters; line breaks and tabs stay."""
    return "".join(chr(0x2400 + ord(sign)) if ord(sign) < 32 and sign not in "\n\t" else sign for sign in str(text))
