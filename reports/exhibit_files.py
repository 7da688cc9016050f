"""Exhibits as files: figures as SVG, PNG and PDF, tables as CSV, Markdown and LaTeX."""

from collections.abc import Iterable
from pathlib import Path

from lineage.atomic import write_bytes
from lineage.errors import BadInput
from reports.exhibit import Exhibit
from reports.render import CANVASES, Drawing, figure_bytes

TEXTS = ("csv", "md", "tex")


def write_exhibit(folder: Path, exhibit: Exhibit, drawing: Drawing | None) -> None:
    """Write NAME.csv, with .svg and .png for a figure, .md and .tex for tables."""
    for form in TEXTS if exhibit.tables else TEXTS[:1]:
        (folder / f"{exhibit.name}.{form}").write_bytes(_text(exhibit, form))
    if drawing:
        (folder / f"{exhibit.name}.svg").write_bytes(drawing.svg)
        (folder / f"{exhibit.name}.png").write_bytes(drawing.png)


def export_exhibit(exhibits: Iterable[Exhibit], name: str, form: str, folder: Path) -> Path:
    """Write one exhibit in one form; `name` may have the catalogue's slash.

    Raises BadInput for an unknown exhibit or form, or a form that the exhibit does not have.
    """
    by_name = {exhibit.name: exhibit for exhibit in exhibits}
    wanted = name.replace("/", "-")
    if wanted not in by_name:
        raise BadInput(f"there is no figure or table {name!r}; there are {', '.join(sorted(by_name))}")
    exhibit = by_name[wanted]
    forms = ("csv", *(TEXTS[1:] if exhibit.tables else ()), *(CANVASES if exhibit.draw else ()))
    if form not in forms:
        raise BadInput(f"{wanted} has no {form!r}; it can be written as {', '.join(forms)}")
    path = folder / f"{wanted}.{form}"
    write_bytes(path, figure_bytes(exhibit, form) if form in CANVASES else _text(exhibit, form))
    return path


def _text(exhibit: Exhibit, form: str) -> bytes:
    if form == "csv":
        text = exhibit.data.csv
    else:
        text = "\n".join(table.markdown if form == "md" else table.latex for table in exhibit.tables)
    return text.encode("utf-8", "replace")
