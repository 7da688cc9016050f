"""A figure as an inline drawing for the page and as SVG and PNG files beside it."""

import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from reports.exhibit import Draw
from reports.style import figure_style, follow_theme

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
_UNWANTED = (
    re.compile(r"<metadata>.*?</metadata>", re.DOTALL),
    re.compile(r"<style[^>]*>.*?</style>", re.DOTALL),
    re.compile(r' id="[A-Za-z.]+_\d+"'),
    re.compile(r"\n\s*"),
)


@dataclass(frozen=True)
class Drawing:
    """One figure in every form the report needs; the inline forms hold no reference to anything outside them."""

    wide: Markup
    narrow: Markup
    svg: bytes
    png: bytes


def render(name: str, draw: Draw, alt: str) -> Drawing:
    """Draw a figure for both page widths; `alt` is its text alternative. The same input gives the same bytes."""
    with figure_style(f"{name}-wide"):
        figure = draw(False)
        wide = _inline(_save(figure, "svg", transparent=True), alt, "wide")
        svg = _save(figure, "svg", transparent=False)
        png = _save(figure, "png", transparent=False)
    with figure_style(f"{name}-narrow"):
        narrow = _inline(_save(draw(True), "svg", transparent=True), alt, "narrow")
    return Drawing(wide, narrow, svg, png)


def write_drawing(directory: Path, name: str, drawing: Drawing) -> None:
    """Write NAME.svg and NAME.png."""
    (directory / f"{name}.svg").write_bytes(drawing.svg)
    (directory / f"{name}.png").write_bytes(drawing.png)


def _save(figure: "Figure", form: str, transparent: bool) -> bytes:
    buffer = io.BytesIO()
    metadata = _METADATA if form == "svg" else None
    background = "none" if transparent else "white"
    figure.savefig(buffer, format=form, dpi=160, facecolor=background, metadata=metadata)
    return buffer.getvalue()


def _inline(svg: bytes, alt: str, layout: str) -> Markup:
    text = svg.decode("utf-8")
    text = text[text.index("<svg") :]
    for pattern, replacement in zip(_UNWANTED, ("", "", "", " "), strict=True):
        text = pattern.sub(replacement, text)
    head, body = text.split(">", 1)
    match = re.search(r'viewBox="[^"]*"', head)
    view_box = match[0] if match else ""
    opening = f'<svg class="{layout}" {view_box} role="img" aria-label="{escape(alt)}">'
    return Markup(follow_theme(opening + body))
