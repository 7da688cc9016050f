"""The page: figures, tables and sentences put into one self-contained HTML file."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lineage.atomic import new_directory
from lineage.digest import seal
from lineage.records import Kind, Record
from reports import data_card, findings, tables
from reports.benchmarks import Benchmarks
from reports.curves import build_curves, model_order
from reports.evaluations import CONVENTIONS, EVALUATIONS, evaluation_rows, evaluations_csv
from reports.exhibit import Exhibit
from reports.load import DATASET, LEDGER, MARKER, RECORDS, Reproduction
from reports.numbers import show
from reports.render import Draw, render, write_drawing
from reports.style import KIND_GLYPHS, KIND_MEANINGS, theme_css

REPORT = "report"


def build_report(reproduction: Reproduction, benchmarks: Benchmarks | None = None) -> Path:
    """Write `report/` inside the reproduction directory, whole or not at all, and return the page's path.

    The folder holds index.html, which refers to nothing outside itself, and figures/NAME.{svg,png,csv}; it is sealed
    on its own. The same reproduction gives the same bytes.
    """
    exhibits = _exhibits(reproduction)
    if benchmarks:
        exhibits |= {one.exhibit.name: one.exhibit for one in benchmarks.found}
    html = render_page(reproduction, exhibits, benchmarks)
    target = reproduction.directory / REPORT
    with new_directory(target) as directory:
        figures = directory / "figures"
        figures.mkdir()
        (directory / "index.html").write_bytes(html.encode("utf-8", "replace"))
        for exhibit in exhibits.values():
            (figures / f"{exhibit.name}.csv").write_bytes(exhibit.csv.encode("utf-8", "replace"))
            if exhibit.drawing:
                write_drawing(figures, exhibit.name, exhibit.drawing)
        seal(directory)
    return target / "index.html"


def render_page(reproduction: Reproduction, exhibits: dict[str, Exhibit], benchmarks: Benchmarks | None = None) -> str:
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
    return environment.get_template("page.html").render(_context(reproduction, exhibits, benchmarks))


def printable(text: object) -> str:
    """Text with control characters made visible; line breaks and tabs are kept."""
    return "".join(chr(0x2400 + ord(sign)) if ord(sign) < 32 and sign not in "\n\t" else sign for sign in str(text))


def _context(
    reproduction: Reproduction, exhibits: dict[str, Exhibit], benchmarks: Benchmarks | None
) -> dict[str, Any]:  # fmt: skip
    summary, manifest = reproduction.summary, reproduction.manifest
    folder = Path(__file__).parent / "templates"
    source_state = manifest.get("environment", {}).get("source", {})
    ours = _own_kind(reproduction)
    curves = _figure_6_curves(reproduction)
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
        "glyphs": KIND_GLYPHS,
        "meanings": KIND_MEANINGS,
        "limits": findings.scale_limits(reproduction),
        "findings": [
            findings.ordering_finding(curves, reproduction.select("2019/figure-6")),
            findings.evaluation_finding(table_3),
            findings.data_finding(reproduction.ledger, ours),
        ],
        "exhibits": exhibits,
        "fields": tables.RECORD_FIELDS,
        "series": [name for name in order if name in named or any(r.series == name for r in table_3)],
        "benchmarks": tables.compare(table_3, tables.BENCHMARKS),
        "fallbacks": tables.compare(table_3, tables.FALLBACKS),
        "shape_columns": [title for _, title in tables.SHAPE],
        "shapes": tables.shapes(summary.models, ours),
        "trainings": tables.trainings(summary.models),
        "attrition": tables.attrition(reproduction.ledger) if reproduction.ledger else [],
        "provenance": tables.provenance(reproduction),
        "redraw": _redraw(reproduction, benchmarks),
        "bench": benchmarks,
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


def _exhibits(reproduction: Reproduction) -> dict[str, Exhibit]:
    """Everything that has numbers; what has none is absent."""
    from reports.figures import figure_6, ledger_funnel, near_duplicates, training_loss

    found: dict[str, Exhibit] = {}
    records = reproduction.select("2019/figure-6", "validation_perplexity")
    curves = _figure_6_curves(reproduction)
    if curves:
        title = "Validation perplexity against iterations"
        caption = findings.ordering_caption(curves)
        alt = findings.figure_6_alt(curves)
        found["figure-6"] = _figure(
            reproduction,
            "figure-6",
            title,
            caption,
            alt,
            lambda narrow: figure_6.draw(curves, narrow),
            records,
        )
    records = reproduction.select("2019/training-loss", "training_loss")
    losses = build_curves(records, model_order(reproduction))
    if losses:
        title = "Training loss against iterations"
        found["training-loss"] = _figure(
            reproduction,
            "training-loss",
            title,
            [findings.training_loss_caption(losses)],
            findings.training_loss_alt(losses),
            lambda narrow: training_loss.draw(losses, narrow),
            records,
        )
    records = reproduction.select("2019/table-3")
    if records:
        rows = tuple(tables.record_rows(records))
        command = _command(reproduction, "table-3")
        text = tables.records_csv(records)
        found["table-3"] = Exhibit("table-3", "WikiText-103 and LAMBADA", [], text, command, rows=rows)
    shown = {(row["experiment"], row["quantity"]) for exhibit in found.values() for row in exhibit.rows}
    further = [r for r in reproduction.records if (r.experiment, r.quantity) not in shown]
    if further:
        text = tables.records_csv(further)
        rows = tuple(tables.record_rows(further))
        command = _command(reproduction, "validation")
        found["further-numbers"] = Exhibit("further-numbers", "Further numbers", [], text, command, rows=rows)
    ledger = reproduction.ledger
    if ledger:
        alt = findings.funnel_alt(ledger)
        drawing = render("data-ledger", lambda narrow: ledger_funnel.draw(ledger.stages, narrow), alt)
        command = _command(reproduction, "data-ledger", "ledger")
        caption = ["Solid: kept after the stage. Hatched: dropped by the stage."]
        title = "What each stage kept and dropped"
        text = tables.ledger_csv(ledger)
        found["data-ledger"] = Exhibit("data-ledger", title, caption, text, command, drawing)
    banding = ledger.near_duplicates if ledger else None
    if banding:
        name, title = "near-duplicates", "Near-duplicates: what the banding finds"
        drawing = render(name, lambda narrow: near_duplicates.draw(banding, narrow), data_card.banding_alt(banding))
        command = _command(reproduction, "data-ledger", "ledger")
        text = data_card.banding_csv(banding)
        found[name] = Exhibit(name, title, data_card.banding_caption(banding), text, command, drawing)
    if reproduction.evaluations:
        text = evaluations_csv(reproduction.evaluations)
        command = _command(reproduction, "table-3")
        found["evaluations"] = Exhibit("evaluations", "Evaluations by convention", [], text, command)
    if reproduction.summary.models:
        text = tables.models_csv(reproduction.summary.models, _own_kind(reproduction))
        command = _command(reproduction, "models")
        found["models"] = Exhibit("models", "Published and trained shapes", [], text, command)
    return found


def _figure(
    reproduction: Reproduction,
    name: str,
    title: str,
    caption: list[str],
    alt: str,
    draw: Draw,
    records: list[Record],
) -> Exhibit:
    rows = tuple(tables.record_rows(records))
    text = tables.records_csv(records)
    command = _command(reproduction, name)
    return Exhibit(name, title, caption, text, command, render(name, draw, alt), rows)


def _figure_6_curves(reproduction: Reproduction) -> list[Any]:
    records = reproduction.select("2019/figure-6", "validation_perplexity")
    return build_curves(records, model_order(reproduction))


def _own_kind(reproduction: Reproduction) -> Kind:
    return "scaled" if reproduction.summary.mode == "scaled" else "measured"


def _command(reproduction: Reproduction, *names: str) -> str:
    """The command that makes the numbers again, as the summary gives it; empty if it gives none."""
    commands = reproduction.summary.commands
    for name in names:
        for key in (name, f"2019/{name}"):
            if key in commands:
                return commands[key]
    return ""


def _redraw(reproduction: Reproduction, benchmarks: Benchmarks | None) -> str:
    bench = f" --bench {benchmarks.name}" if benchmarks else ""
    return f"mlm-report build {reproduction.directory.parent.name}/{reproduction.name}{bench}"
