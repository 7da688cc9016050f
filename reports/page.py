"""The page: figures, tables and sentences in one self-contained HTML file."""

from pathlib import Path

from markupsafe import Markup

from mlm_repro.experiments.catalogue import PAPERS, load_experiments
from mlm_repro.experiments.verdicts import WORDS, counted, totals
from mlm_repro.lineage.atomic import JSON, new_directory
from mlm_repro.lineage.digest import seal
from mlm_repro.lineage.files import write_document
from mlm_repro.lineage.lock import claimed
from mlm_repro.lineage.numbers import percent, size_bytes
from mlm_repro.reports import tables
from mlm_repro.reports.claims import described
from mlm_repro.reports.render import Drawing, files_of, render_all
from mlm_repro.reports.report import REPORT, SOURCES, Report
from mlm_repro.reports.style import (
    KIND_GLYPHS,
    KIND_MEANINGS,
    LOOKS,
    template_environment,
    theme_css,
)


def build_report(report: Report, out: Path | None = None) -> Path:
    """Write the page of `report` with its figures and data into the folder `out`, by default
    `report/` inside the reproduction, whole or not at all; a folder that is there is replaced,
    whatever it holds. Return the path of index.html. Raises BadInput if another command has
    reserved the folder.

    index.html refers to nothing outside itself. For each exhibit there is figures/NAME.csv, with
    NAME.svg if it has a figure. sources.json names the runs behind the page. The folder is sealed
    on its own, and the same results give the same bytes.
    """
    target = out or report.reproduction.directory / REPORT
    with claimed(target), new_directory(target) as directory:
        write_report(report, directory)
        seal(directory)
    return target / "index.html"


def write_report(report: Report, directory: Path) -> None:
    """Write a report's files into the empty directory `directory`: index.html, each exhibit's
    figure and data in `figures`, and sources.json."""
    exhibits = report.all_exhibits
    drawings = render_all(exhibits)
    figures = directory / "figures"
    figures.mkdir()
    # A text may have lone surrogates, which UTF-8 cannot carry.
    (directory / "index.html").write_bytes(render_page(report, drawings).encode("utf-8", "replace"))
    for exhibit in exhibits:
        for form, content in files_of(exhibit, drawings.get(exhibit.name)).items():
            (figures / f"{exhibit.name}.{form}").write_bytes(content)
    write_document(directory / SOURCES, report.inputs.sources)


def shell() -> JSON:
    """Return a dict of what the template of every page takes: `style` and `script`, as markup, the
    `glyphs` of the kinds of numbers, and the functions `percent` and `size_bytes`."""
    folder = Path(__file__).parent / "templates"
    return {
        "style": Markup(theme_css() + (folder / "page.css").read_text(encoding="utf-8")),
        "script": Markup((folder / "page.js").read_text(encoding="utf-8")),
        "glyphs": KIND_GLYPHS,
        "percent": percent,
        "size_bytes": size_bytes,
    }


def render_page(report: Report, drawings: dict[str, Drawing]) -> str:
    """Return the HTML of a report's page as one text. `drawings` has the Drawing of each exhibit
    with a figure, by the exhibit's name. Every value is escaped except our own drawings, style and
    script."""
    reproduction = report.reproduction
    verdicts = report.claims
    context = {
        "report": report,
        "alone": False,
        "run": reproduction,
        "summary": reproduction.summary,
        "redraw": report.inputs.command,
        "exhibits": report.exhibits,
        "homes": report.homes,
        "papers": PAPERS,
        "titles": {name: experiment.title for name, experiment in load_experiments().items()},
        "meanings": KIND_MEANINGS,
        "looks": LOOKS,
        "outcomes": list(LOOKS),
        "totals": totals(verdicts),
        "by_paper": totals(verdicts, True),
        "words": {outcome: counted(verdicts, outcome) for outcome in WORDS},
        "described": described,
        "ours": reproduction.own_kind,
        "evaluations": tables.by_protocol(reproduction.evaluations, reproduction.order),
        "tables": tables,
        "drawings": drawings,
    }
    return template_environment().get_template("page.html").render(shell() | context)
