"""Numbers as readable text on terminals and pages, and safe cells of CSV and Markdown tables."""

from collections.abc import Sequence

MISSING = "—"


def show(value: float | int | None) -> str:
    """Return a number as readable text: an int in full, with commas as in `1,234`; an em dash for
    None. A float has, by its size, two decimals below 100, one below 1,000, none below 10,000, and
    four significant digits below 10 million; commas stand as in `12,350`. From there on, and below
    0.1 but for zero, it has up to three significant digits, such as `1.2e+08` or `0.0123`."""
    if value is None:
        return MISSING
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    if size >= 1e7 or 0 < size < 0.1:
        return f"{value:.3g}"
    if size >= 1e4:
        return f"{float(f'{value:.4g}'):,.0f}"
    return f"{value:,.{0 if size >= 1000 else 1 if size >= 100 else 2}f}"


def size_bytes(value: int | None) -> str:
    """Return a size in bytes as text with a decimal unit, such as `1.50 MB`, or an em dash for
    None."""
    if value is None:
        return MISSING
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= factor:
            return f"{value / factor:.2f} {unit}"
    return f"{value:,} B"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a list of one line of text for each row of cells. Columns are padded to equal width,
    two spaces apart; the last column is not padded, and no line ends with spaces. Raises ValueError
    if the rows have different numbers of cells."""
    widths = [max(map(len, column), default=0) for column in zip(*rows, strict=True)][:-1]
    return ["  ".join(map(str.ljust, row, (*widths, 0))).rstrip() for row in rows]


def csv_cell(text: str) -> str:
    """Return `text` as the text of a CSV cell: an apostrophe stands before anything other than a
    number that a spreadsheet would take for a formula. Commas and quotes stay for the CSV writer to
    quote."""
    if not text.startswith(("=", "+", "-", "@", "\t", "\r")):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def exact(value: float | int | None) -> str:
    """Return a number as text, with all recorded digits; a whole one below 10^15 without `.0`. An
    empty text for None."""
    if value is None:
        return ""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(value)


def compact(value: float) -> str:
    """Return a number as a short text for the ticks of an axis, rounded to six significant digits:
    with commas below 10,000, such as `1,500`, and from there on in thousands, millions, billions
    or trillions, such as `150k`, `2.5M`, `8.3B` and `1T`."""
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):g}{letter}"
    return f"{value:,g}"


def percent(part: float, whole: float) -> str:
    """Return `part` of `whole` in per cent as text, such as `12.5 %`, or an em dash if the whole is
    0."""
    return f"{100 * part / whole:.1f} %" if whole else MISSING


def printable(text: object) -> str:
    """Return the text of a value with each control character below U+0020 as a visible symbol; line
    feeds and tabs stay."""
    return "".join(
        chr(0x2400 + ord(sign)) if ord(sign) < 32 and sign not in "\n\t" else sign
        for sign in str(text)
    )
