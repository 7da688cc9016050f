"""The page of two traces: the network top to bottom, each difference beside its tolerance. Imports no torch."""

import math
from pathlib import Path

from markupsafe import Markup

from experiments.verify.traces import Compared
from lineage.atomic import write_text
from reports.numbers import printable
from reports.style import theme_css

STYLE = """
body{font:15px/1.45 system-ui,sans-serif;background:var(--paper);color:var(--ink);max-width:72rem;margin:2rem auto}
table{border-collapse:collapse;width:100%}td,th{padding:.1rem .6rem;text-align:left;border-bottom:1px solid var(--rule)}
td.number{text-align:right;font-variant-numeric:tabular-nums}td.bar{width:30%}
.bar i{display:block;height:.7rem;background:var(--good)}.beyond{color:var(--alert)}
.beyond .bar i{background:var(--alert)}
"""
DECADES = 8
"""Of the bars' scale: a full one is this many decades of tolerances beyond, an empty one as many within."""


def write_page(path: Path, names: tuple[str, str], compared: Compared) -> None:
    """Write the page; it refers to nothing outside itself."""
    first = compared.first
    verdict = f"First: {first.sentence(names[0])}." if first else "Every tensor is within its tolerance."
    rows = Markup("").join(
        Markup(
            '<tr{}><td class="number">{}</td><td>{}</td><td class="number">{:.1e}</td><td class="number">{:.1e}</td>'
            '<td class="bar"><i style="width:{:.0f}%"></i></td></tr>\n'
        ).format(Markup(' class="beyond"') * (not row.is_within), row.iteration + 1, printable(row.tensor), row.largest,
                 row.tolerance, _share(row.largest, row.tolerance))
        for row in compared.rows
    )  # fmt: skip
    missing = Markup("").join(
        Markup("<p>Only in {}: {}.</p>\n").format(name, printable(", ".join(only)))
        for name, only in zip(names, compared.only, strict=True) if only
    )  # fmt: skip
    write_text(path, Markup(
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{1} beside {0}</title>'
        "<style>{2}</style></head><body>\n<h1>{1} beside {0}</h1>\n<p><strong>{3}</strong></p>\n"
        "<p>A bar in the middle is a difference as large as its tolerance; each eighth of half the width is a decade."
        "</p>\n{4}<table><tr><th>iteration</th><th>tensor</th><th>difference</th><th>tolerance</th><th></th></tr>\n{5}"
        "</table></body></html>\n"
    ).format(*names, Markup(theme_css() + STYLE), printable(verdict), missing, rows))  # fmt: skip


def _share(largest: float, tolerance: float) -> float:
    """Percent of the bar."""
    if not largest or not math.isfinite(largest) or not tolerance:
        return 100.0 * (largest > tolerance)
    return min(max(50 + 50 * math.log10(largest / tolerance) / DECADES, 0.0), 100.0)
