"""The data card, the evaluations and other engines on the page: their numbers, and what becomes of bad files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlm_repro.data_pipeline.files import NearDuplicates
from mlm_repro.lineage.digest import seal
from mlm_repro.reports.load import load_reproduction
from mlm_repro.reports.tables import near_duplicates as near_duplicates_text
from tests.architecture.rooms import ROOT
from tests.reports.conftest import Built
from tests.reports.reproduction import evaluation, make_report, near_duplicates, page_text, write_reproduction
from tests.reports.test_page import Outline, rows_of


def test_the_card_shows_settings_digests_and_versions(built: Built) -> None:
    rows = rows_of(built.html)
    assert ["length", "min tokens 128"] in rows
    assert f'sample, bytes 0 to 1,000: 4,000 documents, SHA-256 <code title="{"cd" * 32}">' in built.html
    assert f'train_text_document.bin, 2.00 MB, SHA-256 <code title="{"ab" * 32}">' in built.html
    assert "f0" * 32 in built.html
    assert "langdetect 1.0.9, seed 0, python 3.11.7" in built.html
    assert "2 blank ones passed over" in built.html


def test_near_duplicates_are_counted_at_the_threshold_and_no_recall_is_rounded_up_to_certainty() -> None:
    def said(**changes: Any) -> list[str]:
        return near_duplicates_text(NearDuplicates.model_validate(near_duplicates() | changes))

    assert said()[2].endswith("compared 24 (60.0 %) lie at or above the threshold of 0.7.")
    assert "compared at least 20 (50.0 %) lie" in said(threshold=0.72)[2]
    assert "over 0.9999 at 0.7, 1.0000 at 0.9." in said(expected_recall={"0.7": 0.99994, "0.9": 1.0})[1]


def test_evaluations_show_every_convention_with_its_standard_error(built: Built) -> None:
    rows = rows_of(built.html)
    numbers = ["644 ± 64", "88.25", "643.8", "721.5", "1.520 ± 0.024", "c" * 16]
    assert ["8.3b", "wikitext103", "● scaled partial", *numbers] in rows
    cells = ["1.25 ± 0.15 %", "5 of 400", "-6.47 ± 0.10", "644 ± 64", "c" * 16]
    assert ["8.3b", "lambada", "● scaled partial", *cells] in rows


def test_engines_that_were_compared_stand_on_the_page(built: Built) -> None:
    runs = sorted((ROOT / "results" / "against").glob("against-*-500-*"))
    report = make_report(built.directory, runs)
    section = next(section for section in report.sections if section.name == "engines")
    assert [exhibit.name for exhibit in section.exhibits] == [run.name for run in runs]
    for exhibit in section.exhibits:
        assert exhibit.draw
        losses, differences = exhibit.draw().axes
        assert [len(line.get_xdata()) for line in (*losses.lines, *differences.lines)] == [500, 500, 500]
        assert [line.get_label() for line in losses.lines] == ["ours", "megatron-core"]
        assert "4 of 4 goals" in " ".join(exhibit.caption) or "goals were reached" in " ".join(exhibit.caption)
        assert exhibit.command.startswith("mlm-verify against megatron-core")
    assert {run.name for run in runs} <= {origin.path.name for origin in report.origins}


@pytest.mark.parametrize("edit", ["{", '{"benchmark": "against", "title": "t", "cases": []}'])
def test_a_damaged_comparison_of_engines_is_a_sentence(built: Built, tmp_path: Path, edit: str) -> None:
    run = shutil.copytree(next((ROOT / "results" / "against").glob("against-*-500-*")), tmp_path / "against")
    (run / "against.json").write_text(edit)
    for sealed in (False, True):
        if sealed:
            seal(run)
        (problem,) = make_report(built.directory, [run]).problems
        assert problem.damaged
        assert problem.sentence.startswith("The run against is left out: ")
        assert "against.json" in problem.sentence


def test_an_older_reproduction_says_what_it_does_not_keep(tmp_path: Path) -> None:
    path = write_reproduction(tmp_path, sealed=False)
    (path / "dataset.json").unlink()
    ledger: dict[str, Any] = json.loads((path / "ledger.json").read_text(encoding="utf-8"))
    for key in ("near_duplicates", "shards", "blank_lines"):
        del ledger[key]
    (path / "ledger.json").write_text(json.dumps(ledger))
    assert "data_repository" not in evaluation()
    reproduction = load_reproduction(path)
    assert not any(problem.damaged for problem in reproduction.problems)
    html = page_text(path)
    assert "There is no data card (dataset.json)" in html
    assert '<figure id="data-ledger"' in html


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("dataset.json", "The data card cannot be shown"),
        ("evaluations.jsonl", "The evaluations cannot be shown"),
    ],
)
def test_a_corrupted_file_is_named_in_its_place(tmp_path: Path, name: str, sentence: str) -> None:
    path = write_reproduction(tmp_path)
    (path / name).write_text("{")
    reproduction = load_reproduction(path)
    assert sum(problem.damaged for problem in reproduction.problems) == 2
    html = page_text(path)
    assert sentence in html
    assert f"{name} was changed after {path.name} was sealed" in html
    assert "Near-duplicates are sought with 25 bands" in html
    assert Outline(html).balanced
