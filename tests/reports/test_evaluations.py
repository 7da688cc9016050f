"""Evaluation in detail: checkpoints by protocol, and a text article by article."""

import json
from pathlib import Path

from lineage.atomic import write_text
from reports.evaluations import evaluation_section
from reports.load import load_reproduction
from tests.reports.reproduction import evaluation, write_reproduction


def test_checkpoints_stand_by_protocol(tmp_path: Path) -> None:
    directory = write_reproduction(tmp_path, sealed=False)
    write_text(directory / "evaluations" / "355m-lambada.json", json.dumps(evaluation("lambada", accuracy=0.5)))
    section = evaluation_section(load_reproduction(directory))
    (table,) = next(one for one in section.exhibits if one.name == "protocols").tables
    assert list(table.heads) == ["model", "checkpoint", "lambada", "wikitext103"]
    assert [row[0] for row in table.rows] == ["355m", "8.3b"]
    assert [tuple(row[2:]) for row in table.rows] == [("50.00 % *", "—"), ("1.25 % *", "643.8 *")]


def test_articles_are_drawn_from_the_easiest(tmp_path: Path) -> None:
    directory = write_reproduction(tmp_path, sealed=False)
    size = {"num_targets": 10, "num_original_tokens": 5.0}
    blocks = [size | {"title": title, "num_scored": 10, "nll": n} for title, n in (("hard", 50.0), ("easy", 10.0))]
    blocks.append(size | {"title": "not scored", "num_scored": 0, "nll": 0.0})
    path = directory / "evaluations" / "8.3b-wikitext103.json"
    write_text(path, json.dumps(evaluation(blocks=blocks)))
    section = evaluation_section(load_reproduction(directory))
    exhibit = next(one for one in section.exhibits if one.name == "articles-wikitext103")
    assert exhibit.caption[0] == "Articles in the order of 8.3b: from easy (2.72) to hard (148.4)."
    assert [row[2:] for row in exhibit.data.rows] == [["hard", "5"], ["easy", "1"]]
