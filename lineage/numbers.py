"""How numbers are written for people, on the terminal and on the page, and what stands beside them in tables."""

import math

MISSING = "—"


def show(value: float | int | None) -> str:
    """A readable number of three or four significant digits; whole numbers in full; an em dash for None."""
    if value is None:
        return MISSING
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-3:
        return f"{value:.3g}"
    if size >= 1e4:
        return f"{float(f'{value:.4g}'):,.0f}"
    return f"{value:,.{0 if size >= 1000 else 1 if size >= 100 else 2}f}"


def with_error(value: float | None, error: float | None) -> str:
    """A number with its standard error, both to the error's second digit; as `show` writes it where there is none."""
    if value is None or not error:
        return show(value)
    if abs(value) >= 1e7:
        return f"{value:.2g} ± {error:.1g}"
    places = 1 - math.floor(math.log10(error))
    return " ± ".join(f"{round(each, places):,.{max(places, 0)}f}" for each in (value, error))


def size_bytes(value: int | None) -> str:
    """Bytes with a decimal unit."""
    if value is None:
        return MISSING
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= factor:
            return f"{value / factor:.2f} {unit}"
    return f"{value:,} B"


def csv_cell(text: str) -> str:
    """As it is; what a spreadsheet would take for a formula gets an apostrophe before it."""
    if not text.startswith(("=", "+", "-", "@", "\t", "\r")):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def markdown_cell(text: str) -> str:
    """On one line, with neither markup nor an image that a reader would load."""
    line = " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|")
    return line.replace("<", "&lt;").replace("![", "!\\[")
