"""The page of results, written from what is kept under `results/` when the site is built."""

import base64
import html
import re
from collections.abc import Iterator
from pathlib import Path

from commands import cell, table
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from experiments.benchmark import AGAINST, read_benchmark, sentences, tables
from experiments.catalogue import load_experiments
from experiments.verdicts import count_outcomes, judge, load_results
from reports.engines import engines_exhibit
from reports.exhibit import Table
from reports.load import load_reproduction
from reports.render import render
from reports.tables import comparison_tables, models_tables

MARK = "<!-- generated: results -->"
REPRODUCTION = "reproduce-8.3b"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with everything that is kept."""
    if MARK not in markdown:
        return markdown
    results = Path(config.config_file_path).parent / "results"
    parts = [*_reproduction(results), *_verdicts(results), *_engines(results), *_benchmarks(results), *_faults(results)]
    return markdown.replace(MARK, "\n\n".join(parts))


def markdown(shown: Table) -> str:
    """Write a table in Markdown, its title above."""
    rows = [tuple(map(cell, row)) for row in shown.rows]
    return (f"**{shown.title}**\n\n" if shown.title else "") + table(tuple(map(cell, shown.heads)), rows)


def _reproduction(results: Path) -> Iterator[str]:
    found = load_reproduction(results / REPRODUCTION)
    kind = "scaled" if found.summary.mode == "scaled" else "measured"
    yield "## The reproduction"
    yield f"`make reproduce-8.3b`, on {found.summary.hardware}. {found.summary.twin_rule}"
    for each in (*models_tables(found.summary.models, kind), *comparison_tables(found.records)):
        yield markdown(each)


def _verdicts(results: Path) -> Iterator[str]:
    found = load_results([results, results / "ablations"])
    experiments = load_experiments().values()
    yield "## The published tables and figures"
    yield "What `mlm-experiment list` says from the records that are kept. A simulated number reproduces nothing."
    rows = [(one.name, one.title, count_outcomes(judge([one], found))) for one in experiments]
    yield markdown(Table(("experiment", "title", "claims"), rows, 3))


def _benchmarks(results: Path) -> Iterator[str]:
    yield "## Benchmarks"
    yield "Each row was measured in one run on one machine, interleaved with what it is compared with."
    for path in sorted((results / "bench").glob("*.json")):
        result = read_benchmark(path)
        yield f"### {result.title}"
        yield " ".join((*result.disagreements, *sentences(result)))
        whole = [Table(*rows) for rows in tables(result)]
        yield from map(markdown, [each for each in whole if each.title in ("ratios", "not measured")] or whole)


def _engines(results: Path) -> Iterator[str]:
    yield "## Beside other engines"
    yield "The same weights and samples in two engines ([how](other-engines.md))."
    for path in sorted((results / "against").glob(f"*/{AGAINST}")):
        one = engines_exhibit(path.parent)
        figure = base64.b64encode(render(one).files["svg"]).decode("ascii")
        yield f"### {one.title}"
        yield " ".join(one.caption)
        yield f'<img src="data:image/svg+xml;base64,{figure}" alt="{html.escape(one.alt)}">'
        yield f"```sh\n{one.command}\n```"


def _faults(results: Path) -> Iterator[str]:
    yield "## Faults"
    chaos = (results / "chaos" / "chaos.md").read_text(encoding="utf-8")
    yield re.sub(r"^#", "###", chaos, flags=re.MULTILINE)
