"""The page shows every number with its kind, stands alone, and survives what is missing or
hostile."""

import csv
import json
import re
import shlex
from collections.abc import Sequence
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args

import pytest
from matplotlib.figure import Figure

from mlm_repro.experiments.catalogue import read_errata
from mlm_repro.experiments.reproduce.files import ReproductionSummary
from mlm_repro.experiments.scores import order_verdict
from mlm_repro.experiments.verdicts import SCALES, WORDS, Outcome
from mlm_repro.lineage.digest import check_seal, seal
from mlm_repro.lineage.numbers import exact, show
from mlm_repro.reports import render
from mlm_repro.reports.exhibit import Exhibit, Table
from mlm_repro.reports.figures import Layer, Panel, Point, draw
from mlm_repro.reports.load import load_reproduction
from mlm_repro.reports.report import Inputs
from mlm_repro.reports.style import KIND_GLYPHS, LIGHT, STYLE
from tests.architecture.rooms import ROOT
from tests.reports.conftest import Built
from tests.reports.reproduction import (
    HOSTILE,
    build_page,
    page_text,
    records,
    summary,
    write_reproduction,
)

FIGURES = ("2019-figure-6", "training-loss")
"""Figures as wide as the page."""
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Outline(HTMLParser):
    """Table rows as text, attributes that can load something, and whether the elements nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self.balanced = True
        self._open: list[str] = []
        self._in_cell = False
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        loading = ("src", "href", "xlink:href", "srcset", "data", "action")
        self.references += [value or "" for name, value in attrs if name in loading]
        if tag not in VOID:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self._in_cell = True

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.balanced = False
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[-1][-1] += data


def rows_of(html: str) -> list[list[str]]:
    """Cells of every row of the page's tables, as text."""
    return [[" ".join(cell.split()) for cell in row] for row in Outline(html).rows]


def test_every_record_is_on_the_page_with_its_kind_and_source(built: Built) -> None:
    shown = [set(row) for row in rows_of(built.html)]
    for record in records():
        # Other exhibits are all of one kind.
        if record.experiment in (
            "2019/figure-6",
            "2019/table-3",
        ):
            origin = {
                f"{KIND_GLYPHS[record.kind]} {record.kind}",
                record.source,
                (record.digest or "")[:16],
            }
            assert any(row >= origin | {exact(record.value)} for row in shown), record


def test_numbers_that_say_the_same_in_every_line_are_said_once(built: Built) -> None:
    data = Table(
        ("experiment", "x", "value", "kind", "source"),
        [
            ("e", "1", "2", "scaled", "a"),
            ("e", "1", "2", "published", "b"),
            ("e", "2", "2", "scaled", "a"),
        ],
    )
    shared, table = Exhibit("name", "title", (), data).numbers
    assert shared == {"experiment": "e", "value": "2"}
    assert (table.heads, table.words) == (["kind", "source", "x"], 2)
    assert table.rows == [("scaled", "a", "1"), ("published", "b", "1"), ("scaled", "a", "2")]
    assert "In every line: experiment 2019/training-loss" in built.html


def test_table_3_sets_both_published_sources_beside_the_scaled_number(built: Built) -> None:
    rows = rows_of(built.html)
    sources = list(
        dict.fromkeys(
            each.source for each in records() if each.experiment == "2019/table-3" and not each.seed
        )
    )
    assert rows.count(["model", *sources]) == 2
    assert ["355m", "19.31", "19.22"] in rows
    assert ["8.3b", "66.51 %", "66.51 %"] in rows


def test_no_word_level_perplexity_of_a_twin_is_shown_but_of_its_file(built: Built) -> None:
    """Of five digits none is anywhere, and where a published number stands there is none of a
    twin."""
    kept = page_text(ROOT / "results" / "reproduce-8.3b")
    shown = {cell for row in rows_of(kept) for cell in row}
    found = [
        each.value
        for each in load_reproduction(ROOT / "results" / "reproduce-8.3b").records
        if each.quantity == "heldout_perplexity"
    ]
    assert len(found) == 9
    assert min(found) > 10_000
    assert not [
        cell for cell in shown for value in found if cell.startswith((show(value), f"{value:,.0f}"))
    ]
    assert "over 10,000" in shown
    table_3 = built.html[built.html.index('id="2019-table-3"') :].partition("</section>")[0]
    assert "643.8" not in table_3.partition("numbers behind this")[0]


def test_the_held_out_stand_in_is_named_as_what_it_is(built: Built) -> None:
    assert "These texts are not WikiText-103 and not LAMBADA." in built.html
    assert "Held-out perplexity" not in built.html


def test_the_page_opens_with_the_run_and_then_counts_the_claims(built: Built) -> None:
    first = built.html[built.html.index("<header") : built.html.index("<main>")]
    trained = summary()["models"][-1]["trained"]["parameters"]
    assert (
        f"<h1>Megatron-LM's 8.3b recipe at 1/{round(8_300_000_000 / trained, -1):,.0f} of its size"
        in unescape(first)
    )
    assert f"has {trained:,} parameters, the paper's 8,300,000,000" in unescape(first)
    labels = ReproductionSummary.model_validate(summary()).labels
    assert order_verdict(records(), None, labels) in unescape(first)
    found = re.findall(r'<li><a href="#([^"]+)">([^<]+)</a> ([^<]+)</li>', first)
    assert [name for _, name, _ in found] == ["This run", "Errata found in the papers"]
    assert all(f' id="{place}"' in built.html for place, _, _ in found)
    errata = len(read_errata().errata)
    assert f"{errata} places where a document disagrees with itself" in found[-1][2]
    places = [
        built.html.index(f' id="{name}"')
        for name in ("2019-figure-6", "models", "errata", "claims", "papers")
    ]
    assert places == sorted(places)
    head = built.html[places[3] : places[4]]
    counts = {
        name: cell for cell, name in re.findall(r"<b>([^<]+)</b> .*?</span> ([\w ]+?)</span>", head)
    }
    assert list(counts) == ["confirmed", "contradicted", "predicted", "not tried"]
    rows = rows_of(head)
    assert rows[0] == ["scale", "confirmed", "contradicted", "predicted", "not tried"]
    assert "figures/verdicts.csv" in head


def test_the_totals_are_those_of_the_verdicts_beneath(built: Built) -> None:
    """By rows: of each word as many as the page has claims of it."""
    rows = [
        row
        for row in rows_of(built.html)
        if row and row[0] in (*SCALES, "—") and len(row) == 1 + len(WORDS)
    ]
    assert [row[0] for row in rows] == list(dict.fromkeys(row[0] for row in rows))
    for place, outcome in enumerate(WORDS, 1):
        given = built.html.count(f'<details class="claim {outcome}"')
        assert given == sum(
            int(number) for row in rows for number in re.findall(r"\((\d+)", row[place])
        ), outcome
    assert sum("of" in row[3] for row in rows) == 1


def test_what_was_measured_comes_first_and_what_was_not_tried_last(built: Built) -> None:
    groups = list(STYLE["groups"])
    assert groups == [*(scale for scale in SCALES), "not-tried", "of-others"]
    assert STYLE["outcomes"].keys() == {*get_args(Outcome)}
    places = [built.html.find(f' id="{name}"') for name in groups]
    there = [place for place in places if place >= 0]
    assert places[0] > 0
    assert there == sorted(there)


def test_the_reproduction_says_what_was_run_and_on_what(built: Built) -> None:
    part = built.html[built.html.index('id="reproduction"') :]
    for key in ("reason", "source", "twin_rule", "hardware"):
        assert str(summary()[key]) in part
    assert built.directory.name in part
    assert "0123456789ab" in part
    assert "uncommitted changes" in part


def test_each_exhibit_gives_its_command_and_each_figure_a_text_alternative(built: Built) -> None:
    folder = built.directory.parent.name
    runs = f"{folder}/{built.directory.name} {folder}/experiments"
    redraw = f"mlm-report build {runs}"
    exhibits = len(list((built.page.parent / "figures").glob("*.csv")))
    commands = re.findall(
        r'class="label">(Make again|Redraw from the records)</span> <code>(.+?)</code>', built.html
    )
    assert len(commands) == exhibits
    assert {command for label, command in commands if label.startswith("Redraw")} == {redraw}
    assert "make reproduce TARGET=8.3b" in built.html
    labels = re.findall(r'<svg class="(\w+)"[^>]*role="img" aria-label="[^"]{40,}"', built.html)
    drawn = len(list((built.page.parent / "figures").glob("*.svg")))
    assert labels.count("wide") == len(FIGURES)
    assert labels.count("column") == drawn - len(FIGURES)


def test_no_caption_has_more_than_two_sentences(built: Built) -> None:
    kept = page_text(ROOT / "results" / "reproduce-8.3b", [])
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", built.html + kept, re.DOTALL)
    assert len(captions) > 60
    for caption in captions:
        text = unescape(
            re.sub(r"<strong>.*?</strong>|<span.*?</span>|<[^>]+>", " ", caption)
        ).strip()
        assert len(re.findall(r"[.?!](?=\s+[A-Z“]|$)", text)) <= 2, text


def test_the_command_of_a_page_is_quoted() -> None:
    command = Inputs(Path("my runs/it's one; ls"), [Path("other runs/$(ls)")]).command
    assert shlex.split(command) == ["mlm-report", "build", "my runs/it's one; ls", "other runs"]
    assert "'other runs'" in command


def test_csv_files_hold_the_records(built: Built) -> None:
    experiments = {"2019-figure-6": "2019/figure-6", "training-loss": "2019/training-loss"}
    experiments |= {"2019-table-3": "2019/table-3", "further-numbers": "2019/validation"}
    for name, experiment in experiments.items():
        path = built.page.parent / "figures" / f"{name}.csv"
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        expected = [record for record in records() if record.experiment == experiment]
        assert len(rows) == len(expected)
        for row, record in zip(rows, expected, strict=True):
            assert float(row["value"]) == record.value
            assert (float(row["x"]) if row["x"] else None) == record.x
            kept = (
                row["series"],
                row["kind"],
                row["source"],
                row["digest"],
                row["unit"],
                row["note"],
            )
            assert kept == (
                record.series,
                record.kind,
                record.source,
                record.digest or "",
                record.unit,
                record.note,
            )


def test_figure_6_has_the_curves_of_the_twins(built: Built) -> None:
    folder = built.page.parent / "figures"
    with (folder / "2019-figure-6.csv").open(encoding="utf-8", newline="") as file:
        scaled = {row["series"] for row in csv.DictReader(file) if row["kind"] == "scaled"}
    assert scaled == {"355m", "2.5b", "8.3b"}
    svg = (folder / "2019-figure-6.svg").read_text(encoding="utf-8")
    assert [title in svg for title in (">published<", ">scaled twins<", ">iteration<")] == [
        True
    ] * 3
    for place in range(len(scaled)):
        lines = re.findall(
            rf'<path d="[^"]{{80,}}"[^>]*stroke: {LIGHT[f"model-{place}"]}[^>]*>', svg
        )
        dashes = {re.sub(r".*stroke-dasharray: ([^;]+);.*", r"\1", line) for line in lines}
        assert (len(lines), len(dashes)) == (2, 2), "ours is dotted, theirs is dashed"


def test_ledger_csv_adds_up(built: Built) -> None:
    with (built.page.parent / "figures" / "data-ledger.csv").open(
        encoding="utf-8", newline=""
    ) as file:
        rows = list(csv.DictReader(file))
    dropped = sum(int(row["documents"]) for row in rows if row["decision"] == "dropped")
    kept = [int(row["documents"]) for row in rows if row["decision"] == "kept"]
    assert kept[0] - dropped == kept[-1]


def test_figures_stand_beside_the_page_and_are_sealed(built: Built) -> None:
    folder = built.page.parent / "figures"
    for name in FIGURES:
        assert (folder / f"{name}.svg").read_text(encoding="utf-8").rstrip().endswith("</svg>")
    assert (folder / "models.csv").is_file()
    check_seal(built.page.parent)


def test_the_page_stands_alone(built: Built) -> None:
    outline = Outline(built.html)
    assert outline.balanced
    outside = [ref for ref in outline.references if not ref.startswith(("#", "data:"))]
    assert outside == []
    for pattern in (r"https?:", r"@import", r"url\((?!#|['\"]?#)", r"@font-face"):
        assert not re.search(pattern, built.html), pattern


def test_both_themes_and_print_are_styled(built: Built) -> None:
    assert "prefers-color-scheme:dark" in built.html
    assert "@media print" in built.html
    assert 'id="theme"' in built.html
    assert "stroke: var(--model-2)" in built.html


def test_hostile_text_is_only_text(built: Built) -> None:
    outline = Outline(built.html)
    assert outline.tags.count("script") == 1
    assert "img" not in outline.tags
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;" in built.html
    assert "\x00" not in built.html
    assert "<bdi>" in built.html


def test_hostile_names_stay_out_of_markup(tmp_path: Path) -> None:
    path = write_reproduction(tmp_path, sealed=False)
    marked = "<u>$x_{1}$<u>\"'"
    for name in ("records.jsonl", "summary.json", "ledger.json"):
        text = (path / name).read_text(encoding="utf-8")
        for value in ("8.3b", "length"):
            text = text.replace(f'"{value}"', json.dumps(f"{value}{marked}"))
        text = text.replace(json.dumps("2 cores, no GPU"), json.dumps(HOSTILE))
        (path / name).write_text(text, encoding="utf-8")
    seal(path)
    html = page_text(path)
    outline = Outline(html)
    assert outline.balanced
    assert not {"u", "img"} & set(outline.tags)
    assert outline.tags.count("script") == 1


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    directory = write_reproduction(tmp_path)

    def files() -> dict[Path, bytes]:
        page = build_page(directory)
        return {path: path.read_bytes() for path in page.parent.rglob("*") if path.is_file()}

    assert files() == files()


def test_a_bare_summary_still_makes_a_page(tmp_path: Path) -> None:
    path = write_reproduction(tmp_path, sealed=False)
    (path / "summary.json").write_text('{"target": "8.3b", "mode": "full"}')
    (path / "records.jsonl").write_text("")
    seal(path)
    html = page_text(path)
    assert "The summary lists no models." in html
    assert "does not say where the training text came from" in html
    assert '<figure id="training-loss"' not in html
    assert '<figure id="data-ledger"' in html
    assert Outline(html).balanced


def test_published_points_alone_are_drawn(tmp_path: Path) -> None:
    path = write_reproduction(tmp_path, sealed=False)
    lines = (path / "records.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (path / "records.jsonl").write_text("".join(line for line in lines if '"published"' in line))
    seal(path)
    html = page_text(path)
    assert '<figure id="2019-figure-6"' in html
    assert "At the end: published 355m" in html
    assert "scaled twins" not in html
    assert "There are no training losses in the records." in html


def test_a_figure_is_drawn_again_only_if_its_numbers_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    drawn: list[int] = []
    seen: list[render.Drawing] = []

    def draw_and_count(panels: Sequence[Panel], column: bool) -> Figure:
        drawn.append(panels[0].layers[0].rank)
        return draw(panels, column)

    monkeypatch.setattr(render, "draw", draw_and_count)
    for rank in (0, 0, 1, 1):
        curve = Layer("a", rank, "scaled", (Point(0, 2.0), Point(1, 3.0)))
        figure = Exhibit(
            "loss", "Loss", (), Table((), ()), panels=[Panel([curve], "iteration", "loss")]
        )
        seen.append(render.render(figure))
    assert drawn == [0, 1]
    assert seen[0] == seen[1] != seen[2] == seen[3]
