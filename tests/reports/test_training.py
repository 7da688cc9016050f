"""The training section: its numbers are those of the runs, and what is missing or damaged is said."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.run.files import Timeline
from lineage.digest import seal
from reports.load import load_reproduction, read_training
from reports.training import UTILISATION, bubble, training_section
from tests.reports.conftest import Built
from tests.reports.reproduction import write_reproduction
from tests.reports.trained import ITERATIONS, metrics, timeline, write_training


def rows_of(built: Built, name: str) -> list[dict[str, str]]:
    text = (built.page.parent / "figures" / f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def test_the_curves_csv_is_the_metrics(built: Built) -> None:
    rows = {int(row["iteration"]): row for row in rows_of(built, "training-curves") if row["model"] == "8.3b"}
    expected = {line["iteration"]: line for line in metrics() if line["kind"] == "train"}
    assert rows.keys() == {0, *expected}
    for iteration, line in expected.items():
        for field in ("loss", "learning_rate", "tokens_per_second", "model_tflops"):
            assert float(rows[iteration][field]) == line[field]
    assert rows[3]["gradient_norm"] == ""
    assert float(rows[10]["validation_perplexity"]) == 1000 / 11
    assert (rows[0]["loss"], rows[0]["validation_perplexity"]) == ("", "1000")


def test_memory_stands_beside_the_formula(built: Built) -> None:
    rows = [tuple(row.values()) for row in rows_of(built, "rank-memory")]
    assert rows[:3] == [
        ("computed", "355m", "", "10000000"), ("scaled", "355m", "0", "14000000"), ("scaled", "355m", "1", "12000000"),
    ]  # fmt: skip
    assert "140.0 %" in built.html


def test_a_pipeline_is_drawn_planned_and_measured(built: Built) -> None:
    rows = rows_of(built, "pipeline-8.3b")
    assert len(rows) == 16
    assert {row["kind"] for row in rows} == {"computed", "scaled"}
    assert rows[1] == {
        "schedule": "1f1b", "kind": "computed", "rank": "0", "pass": "F", "microbatch": "1", "chunk": "0", "start": "1",
        "end": "2", "unit": "forward passes",
    }  # fmt: skip
    assert '<figure id="pipeline-8.3b">' in built.html


def test_the_bubble_is_idle_over_the_busiest_time() -> None:
    found = Timeline.model_validate(timeline())
    assert bubble(found.planned) == pytest.approx(9 / 6 - 1)
    assert bubble(found.measured) == pytest.approx(9 / 6 - 1)


def test_utilisation_is_a_share_where_the_limit_was_measured(tmp_path: Path) -> None:
    directory = write_reproduction(tmp_path, trained=True)
    before = load_reproduction(directory)
    assert UTILISATION not in training_section(before).exhibits[0].alt
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    for model in summary["models"]:
        model["matrix_gflops"] = 50.0
    (directory / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    assert UTILISATION in training_section(load_reproduction(directory)).exhibits[0].alt


def truncate(folder: Path) -> None:
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    (folder / "metrics.jsonl").write_text(text[: len(text) // 2], encoding="utf-8")


def replace_line(folder: Path) -> None:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    lines[4] = '{"kind": "train", "iteration": 4, "loss": NaN}'
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "sentence", "damaged"),
    [
        (replace_line, "Line 5 of the metrics of 8.3b is left out", True),
        (lambda folder: (folder / "metrics.jsonl").write_text(""), "The metrics of 8.3b are empty", False),
        (lambda folder: (folder / "metrics.jsonl").unlink(), "8.3b has written no metrics yet", False),
        (lambda folder: (folder / "timeline.json").write_text("[]"), "The timeline of 8.3b cannot be shown", True),
        (lambda folder: (folder / "summary.json").write_text("{"), "The summary of 8.3b cannot be shown", True),
    ],
)
def test_what_is_damaged_is_said_and_the_rest_is_shown(
    change: Callable[[Path], object], sentence: str, damaged: bool, tmp_path: Path
) -> None:
    directory = write_reproduction(tmp_path, sealed=False, trained=True)
    change(directory / "training" / "8.3b")
    seal(directory)
    reproduction = load_reproduction(directory)
    (problem,) = reproduction.problems
    assert problem.sentence.startswith(sentence)
    assert problem.damaged == damaged
    section = training_section(reproduction)
    assert [problem.sentence] == list(section.problems)
    assert {"training-curves", "rank-memory"} <= {exhibit.name for exhibit in section.exhibits}


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    folder = write_training(tmp_path / "run")
    truncate(folder)
    found = read_training(folder, "run")
    assert found.problems == ()
    assert 10 < found.steps[-1].iteration < ITERATIONS


def test_a_reproduction_without_curves_says_so(tmp_path: Path) -> None:
    section = training_section(load_reproduction(write_reproduction(tmp_path)))
    assert section.exhibits == []
    assert "keeps no curves" in section.problems[0]
