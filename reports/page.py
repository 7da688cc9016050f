"""The page: figures, tables and sentences put into one self-contained HTML file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lineage.atomic import new_directory
from lineage.digest import seal
from reports import data_card, findings, tables
from reports.benchmarks import Benchmarks
from reports.curves import model_order
from reports.evaluations import CONVENTIONS, EVALUATIONS, evaluation_rows
from reports.exhibit import Exhibit, Section
from reports.load import DATASET, LEDGER, MARKER, RECORDS, Reproduction
from reports.numbers import printable, show
from reports.render import Drawing, render, write_drawing
from reports.reproduced import figure_6_curves, own_kind, reproduction_exhibits
from reports.style import KIND_GLYPHS, KIND_MEANINGS, theme_css

REPORT = "report"


def build_report(reproduction: Reproduction, benchmarks: Benchmarks | None = None) -> Path:
    """Write `report/` inside the reproduction directory, whole or not at all, and return the page's path.

    The folder holds index.html, which refers to nothing outside itself, and for each exhibit figures/NAME.csv, with
    .svg and .png where it is drawn, .md and .tex where it is tables; it is sealed on its own. The same reproduction
    gives the same bytes.
    """
    exhibits = reproduction_exhibits(reproduction)
    sections = report_sections(reproduction, benchmarks)
    found = [*exhibits.values(), *(exhibit for section in sections for exhibit in section.exhibits)]
    drawings = {one.name: render(one.name, one.draw, one.alt) for one in found if one.draw}
    html = render_page(reproduction, exhibits, sections, drawings, benchmarks)
    target = reproduction.directory / REPORT
    with new_directory(target) as directory:
        figures = directory / "figures"
        figures.mkdir()
        (directory / "index.html").write_bytes(html.encode("utf-8", "replace"))
        for exhibit in found:
            _write_exhibit(figures, exhibit, drawings.get(exhibit.name))
        seal(directory)
    return target / "index.html"


def report_sections(reproduction: Reproduction, benchmarks: Benchmarks | None) -> list[Section]:
    """The parts of the page that are lists of exhibits."""
    return [benchmarks.section] if benchmarks else []


def render_page(
    reproduction: Reproduction,
    exhibits: dict[str, Exhibit],
    sections: Sequence[Section],
    drawings: dict[str, Drawing],
    benchmarks: Benchmarks | None,
) -> str:
    """The HTML text; every value is escaped except drawings and styles made here."""
    environment = Environment(
        loader=PackageLoader("reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["printable"] = printable
    environment.filters["show"] = show
    redraw = f"mlm-report build {reproduction.directory.parent.name}/{reproduction.name}"
    environment.globals |= {
        "drawings": drawings,
        "glyphs": KIND_GLYPHS,
        "redraw": redraw + (f" --bench {benchmarks.name}" if benchmarks else ""),
    }
    return environment.get_template("page.html").render(_context(reproduction, exhibits, sections))


def _write_exhibit(folder: Path, exhibit: Exhibit, drawing: Drawing | None) -> None:
    files = {"csv": exhibit.data.csv}
    if exhibit.tables:
        files["md"] = "\n".join(table.markdown for table in exhibit.tables)
        files["tex"] = "\n".join(table.latex for table in exhibit.tables)
    for form, text in files.items():
        (folder / f"{exhibit.name}.{form}").write_bytes(text.encode("utf-8", "replace"))
    if drawing:
        write_drawing(folder, exhibit.name, drawing)


def _context(
    reproduction: Reproduction, exhibits: dict[str, Exhibit], sections: Sequence[Section]
) -> dict[str, Any]:  # fmt: skip
    summary, manifest = reproduction.summary, reproduction.manifest
    folder = Path(__file__).parent / "templates"
    source_state = manifest.get("environment", {}).get("source", {})
    ours = own_kind(reproduction)
    table_3 = reproduction.select("2019/table-3")
    order = model_order(reproduction)
    texts, clozes = evaluation_rows(reproduction.evaluations, order)
    named = {model.name for model in summary.models}
    return {
        "style": Markup(theme_css() + (folder / "page.css").read_text(encoding="utf-8")),
        "script": Markup((folder / "page.js").read_text(encoding="utf-8")),
        "run": reproduction,
        "summary": summary,
        "created": str(manifest.get("created", "")).replace("T", " ").replace("+00:00", " UTC"),
        "commit": summary.commit or source_state.get("commit") or "",
        "dirty": bool(source_state.get("dirty")),
        "packages": manifest.get("environment", {}).get("packages", {}),
        "identity": str(manifest.get("identity", "")),
        "parents": manifest.get("parents", {}),
        "ours": ours,
        "meanings": KIND_MEANINGS,
        "limits": findings.scale_limits(reproduction),
        "findings": [
            findings.ordering_finding(figure_6_curves(reproduction), reproduction.select("2019/figure-6")),
            findings.evaluation_finding(table_3),
            findings.data_finding(reproduction.ledger, ours),
        ],
        "exhibits": exhibits,
        "sections": sections,
        "series": [name for name in order if name in named or any(r.series == name for r in table_3)],
        "benchmarks": tables.compare(table_3, tables.BENCHMARKS),
        "fallbacks": tables.compare(table_3, tables.FALLBACKS),
        "shape_columns": [title for _, title in tables.SHAPE],
        "shapes": tables.shapes(summary.models, ours),
        "trainings": tables.trainings(summary.models),
        "attrition": tables.attrition(reproduction.ledger) if reproduction.ledger else [],
        "provenance": tables.provenance(reproduction),
        "card": reproduction.card,
        "card_settings": data_card.settings(reproduction.card) if reproduction.card else [],
        "card_files": data_card.files(reproduction.card) if reproduction.card else [],
        "shards": data_card.shards(reproduction.ledger.shards) if reproduction.ledger else [],
        "conventions": CONVENTIONS,
        "texts": texts,
        "clozes": clozes,
        "marker_problems": reproduction.problems_of(MARKER),
        "record_problems": reproduction.problems_of(RECORDS),
        "ledger_problems": reproduction.problems_of(LEDGER),
        "card_problems": reproduction.problems_of(DATASET),
        "evaluation_problems": reproduction.problems_of(EVALUATIONS),
    }
