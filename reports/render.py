"""Exhibits as files: a figure inline on the page and as SVG; numbers as CSV."""

import hashlib
import io
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version

from markupsafe import Markup, escape

from mlm_repro.lineage.progress import Progress
from mlm_repro.lineage.remembered import digest_of, recall, remember
from mlm_repro.lineage.shipped import HOME
from mlm_repro.reports.exhibit import Exhibit
from mlm_repro.reports.figures import draw
from mlm_repro.reports.style import LIGHT, figure_style, follow_theme

_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
_UNWANTED = re.compile(
    r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>"
    r'| id="[A-Za-z0-9.]+_\d+"| transform="rotate\(-?0 [^"]*"|xlink:(?=href)',
    re.DOTALL,
)


@dataclass(frozen=True)
class Drawing:
    """Figure in two forms: an SVG element inline on the page, which refers to nothing outside
    itself, and the bytes of an SVG file."""

    inline: Markup
    svg: bytes


def render_all(exhibits: Iterable[Exhibit]) -> dict[str, Drawing]:
    """Return a dict exhibit's name → Drawing, for each exhibit that has a figure, and show progress
    on standard error; the same input gives the same bytes."""
    drawings = {}
    drawn = [exhibit for exhibit in exhibits if exhibit.panels]
    with Progress("report", len(drawn), "figures") as progress:
        for exhibit in drawn:
            drawings[exhibit.name] = render(exhibit)
            progress.advance()
    return drawings


def render(exhibit: Exhibit) -> Drawing:
    """Return the Drawing of an exhibit that has a figure. It is the one that this user's cache has,
    unless the numbers, the code or Matplotlib changed; a new one is cached for the next call."""
    numbers = hashlib.sha256(json.dumps(exhibit.panels, default=vars).encode()).hexdigest()
    name = f"figure-{exhibit.name}"
    made_of = f"{_drawn_with()} {exhibit.name} {numbers}"
    if not (svg := recall(name, made_of)):
        svg = _draw(exhibit)
        remember(name, made_of, svg)
    return Drawing(_inline(svg.decode("utf-8"), exhibit), svg)


@cache
def _drawn_with() -> str:
    return digest_of(HOME / "lineage", HOME / "reports", facts=version("matplotlib"))


def _draw(exhibit: Exhibit) -> bytes:
    """Draw the exhibit's figure and return it as the bytes of an SVG file, with its layout, in one
    pass; `savefig` would draw a figure with a layout twice."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    with figure_style(exhibit.name):
        figure = draw(exhibit.panels, exhibit.column)
        figure.set_facecolor(LIGHT["paper"])
        figure.set_dpi(160)
        buffer = io.BytesIO()
        FigureCanvasSVG(figure).print_svg(buffer, metadata=_METADATA)
    return buffer.getvalue()


def _inline(svg: str, exhibit: Exhibit) -> Markup:
    """Return the `<svg>` element of an exhibit's figure for the page, as Markup, from `svg`, the
    text of the figure's SVG file: each palette colour becomes a custom property of the page, styles
    become classes, and coordinates are rounded to a tenth of a point. The element has the exhibit's
    text alternative and the class `column` or `wide`."""
    styles = {}

    def shorten(attribute: re.Match[str]) -> str:
        return re.sub(
            r"\d+\.\d+", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), attribute[0]
        )

    def as_class(style: re.Match[str]) -> str:
        name = f"s{hashlib.sha256(style[1].encode()).hexdigest()[:6]}"
        styles[name] = style[1]
        return f' class="{name}"'

    head, body = svg[svg.index("<svg") :].split(">", 1)
    body = re.sub(r' style="([^"]*)"', as_class, follow_theme(_UNWANTED.sub("", body)))
    body = re.sub(r"\s+", " ", re.sub(r' (d|x|y|transform)="[^"]*"', shorten, body))
    rules = "".join(f".{name}{{{style}}}" for name, style in styles.items())
    view_box = re.search(r'viewBox="[^"]*"', head)
    layout = "column" if exhibit.column else "wide"
    opening = (
        f'<svg class="{layout}" {view_box[0] if view_box else ""} role="img"'
        f' aria-label="{escape(exhibit.alt)}">'
    )
    return Markup(f"{opening}<style>{rules}</style>{body}")


def files_of(exhibit: Exhibit, drawing: Drawing | None) -> dict[str, bytes]:
    """Return the contents of the files of `exhibit` as a dict ending → bytes: `csv`, its data in
    UTF-8, and `svg`, the picture in `drawing`, which the caller has drawn, unless that is None."""
    return {"csv": exhibit.data.csv.encode("utf-8", "replace")} | (
        {"svg": drawing.svg} if drawing else {}
    )
