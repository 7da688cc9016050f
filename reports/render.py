"""Exhibits as files: a figure inline on the page, as SVG and PDF; tables as CSV and LaTeX."""

import hashlib
import io
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape
from matplotlib.backends.backend_pdf import FigureCanvasPdf, PdfPages
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from lineage.atomic import write_bytes
from lineage.errors import BadInput
from lineage.progress import Progress
from reports.exhibit import Exhibit
from reports.style import LIGHT, figure_style, follow_theme

_METADATA: dict[str, dict[str, Any]] = {
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
}
_UNWANTED = re.compile(
    r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>"
    r'| id="[A-Za-z0-9.]+_\d+"| transform="rotate\(-?0 [^"]*"|xlink:(?=href)',
    re.DOTALL,
)
CANVASES = {"svg": FigureCanvasSVG, "pdf": FigureCanvasPdf}
"""Canvas of each form of a figure."""
CAPTION_INCHES = 0.16
"""Height of a caption's line in the PDF."""


@dataclass(frozen=True)
class Drawing:
    """One figure as SVG and inline; the inline forms refer to nothing outside them."""

    inline: tuple[Markup, ...]
    """One form for every width, or one for a wide and one for a narrow page, with classes of `styles`."""
    svg: bytes
    styles: Mapping[str, str] = field(default_factory=dict)
    """Declarations by class; a declaration has the same class on every page."""


def render_all(exhibits: Iterable[Exhibit], title: str) -> tuple[dict[str, Drawing], bytes]:
    """Draw every figure of the exhibits, and a PDF with a page for each figure, its title and its caption.

    The same input gives the same bytes.
    """
    drawings, buffer = {}, io.BytesIO()
    drawn = [exhibit for exhibit in exhibits if exhibit.draw]
    metadata = {"Title": title, **_METADATA["pdf"]}
    with PdfPages(buffer, metadata=metadata) as pages, Progress("report", len(drawn), "figures") as progress:
        for exhibit in drawn:
            drawings[exhibit.name] = _render(exhibit, pages)
            progress.advance()
    return drawings, buffer.getvalue()


def _render(exhibit: Exhibit, pages: PdfPages) -> Drawing:
    figure = _draw(exhibit, exhibit.column)
    with figure_style(f"{exhibit.name}-wide"):
        svg = _save(figure, "svg")
        figure.set_layout_engine(None)
        _write_under(figure, exhibit)
        pages.savefig(figure, facecolor="white")
    layouts = {"column" if exhibit.column else "wide": svg}
    if not exhibit.column:
        with figure_style(f"{exhibit.name}-narrow"):
            layouts["narrow"] = _save(_draw(exhibit, True), "svg")
    styles: dict[str, str] = {}
    inline = tuple(_inline(content, exhibit.alt, layout, styles) for layout, content in layouts.items())
    return Drawing(inline, svg, styles)


def figure_bytes(exhibit: Exhibit, form: str) -> bytes:
    """The figure in one of the forms of CANVASES."""
    figure = _draw(exhibit, exhibit.column)
    with figure_style(f"{exhibit.name}-wide"):
        return _save(figure, form)


def _draw(exhibit: Exhibit, narrow: bool) -> Figure:
    if exhibit.draw is None:
        raise ValueError(f"{exhibit.name} has no figure")
    with figure_style(exhibit.name):
        return exhibit.draw(narrow)


def _write_under(figure: Figure, exhibit: Exhibit) -> None:
    """Write title and caption below a finished drawing."""
    width, height = figure.get_size_inches()
    text = f"{exhibit.title}. {' '.join(exhibit.caption)}"
    lines = textwrap.wrap(" ".join(text.split()), int(width * 15.5))
    whole = height + (len(lines) + 1.5) * CAPTION_INCHES
    share = 1 - height / whole
    places = [(axes, axes.get_position()) for axes in figure.axes]
    figure.set_size_inches(width, whole)
    for axes, place in places:
        axes.set_position((place.x0, share + place.y0 * (1 - share), place.width, place.height * (1 - share)))
    top = share - 0.5 * CAPTION_INCHES / whole
    figure.text(0.1 / width, top, "\n".join(lines), va="top", fontsize=8, linespacing=1.35, color=LIGHT["ink"])


def _save(figure: Figure, form: str) -> bytes:
    """Lay out and draw in one pass; `savefig` would draw a figure with a layout twice."""
    buffer = io.BytesIO()
    figure.set_dpi(160)
    figure.set_facecolor(LIGHT["paper"])
    getattr(CANVASES[form](figure), f"print_{form}")(buffer, metadata=_METADATA.get(form))
    return buffer.getvalue()


def _inline(svg: bytes, alt: str, layout: str, styles: dict[str, str]) -> Markup:
    """The drawing for the page: styles as classes, coordinates to a tenth of a point, no metadata."""

    def as_class(match: re.Match[str]) -> str:
        name = f"s{hashlib.sha256(match[1].encode()).hexdigest()[:6]}"
        styles[name] = match[1]
        return f' class="{name}"'

    def shorten(match: re.Match[str]) -> str:
        tag = match[0]
        if tag == "</g>":
            return tag if shown.pop() else ""
        if tag == "<g/>":
            return ""
        if tag.startswith("<g"):
            shown.append(tag != "<g>")
            return tag if shown[-1] else ""
        tag = re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), tag)
        tag = re.sub(r"\s+(?=[MLCQz\"])|(?<=[MLCQ])\s+", "", tag)
        tag = re.sub(r"M(\S+) (\S+)L(\S+) \2L\3 (\S+)L\1 \4z", r"M\1 \2H\3V\4H\1z", tag)  # a rectangle
        return re.sub(r'"M(\S+) (\S+)L(\S+) \2"', r'"M\1 \2H\3"', tag)  # a level line

    text, shown = svg.decode("utf-8"), list[bool]()
    head, body = text[text.index("<svg") :].split(">", 1)
    body = re.sub(r'(?<=["#])([mph][0-9a-f]{5})[0-9a-f]{5}(?=[")])', r"\1", _UNWANTED.sub("", body))  # ids
    body = re.sub(r' style="([^"]*)"', as_class, follow_theme(body))
    body = re.sub(r"<[^>]*>", shorten, re.sub(r">\s+<", "><", body))
    view_box = re.search(r'viewBox="[^"]*"', head)
    opening = f'<svg class="{layout}" {view_box[0] if view_box else ""} role="img" aria-label="{escape(alt)}">'
    return Markup(opening + body)


def write_exhibit(folder: Path, exhibit: Exhibit, drawing: Drawing | None) -> None:
    """Write NAME.csv, NAME.tex if there are tables, and NAME.svg if there is a figure."""
    (folder / f"{exhibit.name}.csv").write_bytes(exhibit.csv)
    if exhibit.tables:
        (folder / f"{exhibit.name}.tex").write_bytes(exhibit.latex)
    if drawing:
        (folder / f"{exhibit.name}.svg").write_bytes(drawing.svg)


def export_exhibit(exhibits: Iterable[Exhibit], name: str, form: str, folder: Path) -> Path:
    """Write one exhibit in one form; `name` may have the catalogue's slash.

    Raises BadInput for an unknown exhibit or form, or a form that the exhibit does not have.
    """
    by_name = {exhibit.name: exhibit for exhibit in exhibits}
    wanted = name.replace("/", "-")
    if wanted not in by_name:
        raise BadInput(f"there is no figure or table {name!r}; there are {', '.join(sorted(by_name))}")
    exhibit = by_name[wanted]
    forms = ("csv", *(("tex",) if exhibit.tables else ()), *(CANVASES if exhibit.draw else ()))
    if form not in forms:
        raise BadInput(f"{wanted} has no {form!r}; it can be written as {', '.join(forms)}")
    path = folder / f"{wanted}.{form}"
    content = figure_bytes(exhibit, form) if form in CANVASES else exhibit.csv if form == "csv" else exhibit.latex
    write_bytes(path, content)
    return path
