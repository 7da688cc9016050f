"""Evaluation in detail: every example is on the page, escaped; what is damaged is left out with a sentence."""

import csv
import json
from pathlib import Path

import pytest

from lineage.atomic import write_text
from lineage.digest import seal
from reports.examples import detail_section
from reports.load import EXAMPLES, load_reproduction
from reports.page import MOST_EXAMPLES, build_report
from reports.report import Inputs, assemble
from tests.reports.conftest import Built
from tests.reports.reproduction import HOSTILE, evaluation, write_reproduction
from tests.reports.trained import example_lines


def test_every_example_is_in_the_table_and_in_the_csv(built: Built) -> None:
    lines = [json.loads(line) for line in example_lines(HOSTILE).splitlines()[1:]]
    with (built.page.parent / "figures" / "examples.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * len(lines)
    for row, line in zip(rows[::3], lines, strict=True):
        assert (row["index"], row["target"], row["model"]) == (str(line["index"]), line["target"], "355m")
        assert float(row["log_probability"]) == line["log_probability"][0]
        assert row["correct"] == ("yes" if line["correct"][0] else "no")
    assert built.html.count("data-right=") == len(lines)
    assert 'data-right="011"' in built.html
    assert HOSTILE not in built.html


def test_of_many_examples_a_page_has_some_and_the_csv_all(tmp_path: Path) -> None:
    directory = write_reproduction(tmp_path, sealed=False)
    head, *lines = example_lines("x").splitlines()
    write_text(directory / EXAMPLES, "\n".join([head, *lines * MOST_EXAMPLES]) + "\n")
    page = build_report(assemble(Inputs(directory))).read_text(encoding="utf-8")
    assert page.count("data-right=") == MOST_EXAMPLES
    assert f"Search {MOST_EXAMPLES} of {len(lines) * MOST_EXAMPLES} examples, evenly spread" in page
    with (directory / "report" / "figures" / "examples.csv").open(encoding="utf-8", newline="") as file:
        assert len(list(csv.DictReader(file))) == 3 * len(lines) * MOST_EXAMPLES


def test_checkpoints_stand_by_protocol(tmp_path: Path) -> None:
    directory = write_reproduction(tmp_path, sealed=False)
    write_text(directory / "evaluations" / "355m-lambada.json", json.dumps(evaluation("lambada", accuracy=0.5)))
    section = detail_section(load_reproduction(directory))
    (table,) = next(one for one in section.exhibits if one.name == "protocols").tables
    assert list(table.heads) == ["model", "checkpoint", "lambada", "wikitext103"]
    assert [row[0] for row in table.rows] == ["355m", "8.3b"]
    assert [tuple(row[2:]) for row in table.rows] == [("50.00 % *", "—"), ("1.25 % *", "643.8 *")]


def test_articles_are_drawn_from_the_easiest(tmp_path: Path) -> None:
    directory = write_reproduction(tmp_path, sealed=False)
    blocks = [{"title": title, "num_scored": 10, "nll": nll} for title, nll in (("hard", 50.0), ("easy", 10.0))]
    blocks.append({"title": "not scored", "num_scored": 0, "nll": 0.0})
    path = directory / "evaluations" / "8.3b-wikitext103.json"
    write_text(path, json.dumps(evaluation(blocks=blocks)))
    section = detail_section(load_reproduction(directory))
    exhibit = next(one for one in section.exhibits if one.name == "articles-wikitext103")
    assert exhibit.caption[0] == "Articles in the order of 8.3b: from easy (2.72) to hard (148.4)."
    assert [row[2:] for row in exhibit.data.rows] == [["hard", "5"], ["easy", "1"]]


@pytest.mark.parametrize(
    ("text", "sentence", "damaged"),
    [
        ("", "the first line of examples.jsonl is no head", True),
        ('{"task": "lambada", "models": []}\n', "the first line of examples.jsonl is no head", True),
        ('{"task": "lambada", "models": ["355m"]}\n', "There are no examples", False),
        (example_lines("x") + '{"index": 7}\n', "Line 6 of examples.jsonl is left out: context", True),
        (example_lines("x").replace("-2.5", "NaN"), "Line 2 of examples.jsonl is left out: log_probability", True),
        (example_lines("x").replace("[false, true, true]", "[true]", 1), "it has not one answer for each of 3", True),
    ],
)
def test_damaged_examples_are_said(text: str, sentence: str, damaged: bool, tmp_path: Path) -> None:
    directory = write_reproduction(tmp_path, sealed=False)
    write_text(directory / EXAMPLES, text)
    seal(directory)
    reproduction = load_reproduction(directory)
    (problem,) = reproduction.problems
    assert sentence in problem.sentence
    assert problem.damaged == damaged
    section = detail_section(reproduction)
    assert problem.sentence in section.problems
    assert any(one.name == "protocols" for one in section.exhibits)


def test_none_kept_is_said_and_is_no_problem(tmp_path: Path) -> None:
    reproduction = load_reproduction(write_reproduction(tmp_path))
    assert reproduction.problems_of(EXAMPLES) == []
    section = detail_section(reproduction)
    assert section.problems == [f"This reproduction keeps no examples ({EXAMPLES})."]
