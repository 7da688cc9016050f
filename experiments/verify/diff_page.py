"""The page of two traces: the network top to bottom, each difference beside its tolerance. Imports no torch."""

import math
from pathlib import Path

from markupsafe import Markup

from engine.compare.tensors import Difference
from experiments.verify.traces import Compared
from lineage.atomic import write_text
from reports.markup import template_environment
from reports.style import theme_css

DECADES = 8
"""Of the bars' scale: a full one is this many decades of tolerances beyond, an empty one as many within."""


def write_page(path: Path, names: tuple[str, str], compared: Compared) -> None:
    """Write the page; it refers to nothing outside itself."""
    first = compared.first
    verdict = f"First: {first.sentence(names[0])}." if first else "Every tensor is within its tolerance."
    page = template_environment().get_template("traces.html").render(
        names=names, verdict=verdict, compared=compared, share=_share, theme=Markup(theme_css())
    )  # fmt: skip
    write_text(path, page + "\n")


def _share(row: Difference) -> float:
    """Percent of the bar."""
    if not row.largest or not math.isfinite(row.largest) or not row.tolerance:
        return 100.0 * (row.largest > row.tolerance)
    return min(max(50 + 50 * math.log10(row.largest / row.tolerance) / DECADES, 0.0), 100.0)
