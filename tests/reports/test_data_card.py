"""The data card, the evaluations and other engines on the page: their numbers, and what becomes of
bad files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlm_repro.data_pipeline.files import NearDuplicates
from mlm_repro.lineage.digest import seal
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from mlm_repro.reports.figures import draw
from mlm_repro.reports.tables import near_duplicates as near_duplicates_text
from tests.architecture.rooms import ROOT
from tests.reports.conftest import Built
from tests.reports.reproduction import (
    evaluation,
    make_report,
    near_duplicates,
    page_text,
    write_reproduction,
)
from tests.reports.test_page import Outline, rows_of


def test_the_card_shows_settings_digests_and_versions(built: Built) -> None:
    rows = rows_of(built.html)
    assert ["length", "min tokens 128"] in rows
    assert (
        f'sample, bytes 0 to 1,000: 4,000 documents, SHA-256 <code title="{"cd" * 32}">'
        in built.html
    )
    assert f'train_text_document.bin, 2.00 MB, SHA-256 <code title="{"ab" * 32}">' in built.html
    assert "f0" * 32 in built.html
    assert "langdetect 1.0.9, seed 0, python 3.11.7" in built.html
    assert "2 blank ones passed over" in built.html


def test_near_duplicates_are_counted_at_the_threshold_and_no_recall_is_rounded_to_certainty() -> (
    None
):
    def said(**changes: Any) -> list[str]:
        return near_duplicates_text(NearDuplicates.model_validate(near_duplicates() | changes))

    assert said()[2].endswith("compared 24 (60.0 %) lie at or above the threshold of 0.7.")
    assert "compared at least 20 (50.0 %) lie" in said(threshold=0.72)[2]
    assert (
        "over 0.9999 at 0.7, 1.0000 at 0.9."
        in said(expected_recall={"0.7": 0.99994, "0.9": 1.0})[1]
    )


def test_evaluations_show_every_convention_with_its_standard_error(built: Built) -> None:
    rows = rows_of(built.html)
    numbers = ["644 ± 64", "88.25", "643.8", "721.5", "1.520 ± 0.024", "c" * 16]
    assert ["8.3b twin (4.17 M), seed 1234", "wikitext103", "● scaled partial", *numbers] in rows
    cells = ["1.25 ± 0.15 %", "5 of 400", "-6.47 ± 0.10", "644 ± 64", "c" * 16]
    assert ["8.3b twin (4.17 M), seed 1234", "lambada", "● scaled partial", *cells] in rows


def test_engines_that_were_compared_stand_on_the_page(built: Built) -> None:
    runs = sorted((ROOT / "results" / "against").glob("against-*-500-*"))
    report = make_report(built.directory, runs)
    exhibit = report.sections["Beside other engines"]  # three runs, one figure
    losses, differences = draw(exhibit.panels).axes
    assert len(runs) == 3
    apart = [float(row[5]) for row in exhibit.data.rows if row[1] == "loss"]
    there = [sum(value > 0 for value in apart[at : at + 500]) for at in (0, 500, 1000)]
    assert [len(line.get_xdata()) for line in losses.lines] == [500] * 6
    # And the tolerance.
    assert [len(line.get_xdata()) for line in differences.lines] == [
        *there,
        500,
    ]
    assert len(apart) == 1500
    assert f"{max(apart):.2g} (serial)" in exhibit.caption[0]
    assert [row[1] for row in exhibit.tables[0].rows] == [
        f"{max(apart[at : at + 500]):.2g}" for at in (0, 500, 1000)
    ]
    assert any("Measured on " in line for line in exhibit.notes)
    assert exhibit.command.startswith("mlm-verify against megatron-core")
    assert {run.name for run in runs} <= {origin.path.name for origin in report.origins}


@pytest.mark.parametrize("edit", ["{", '{"benchmark": "against", "title": "t", "cases": []}'])
def test_a_damaged_comparison_of_engines_is_refused(
    built: Built, tmp_path: Path, edit: str
) -> None:
    run = shutil.copytree(
        next((ROOT / "results" / "against").glob("against-*-500-*")), tmp_path / "against"
    )
    (run / "against.json").write_text(edit)
    for sealed in (False, True):
        if sealed:
            seal(run)
        with pytest.raises((BadInput, IntegrityFailure), match=r"against\.json"):
            make_report(built.directory, [run])


def test_an_unfinished_comparison_of_engines_is_left_out_and_named(
    built: Built, tmp_path: Path
) -> None:
    run = shutil.copytree(
        next((ROOT / "results" / "against").glob("against-*-500-*")), tmp_path / "against"
    )
    (run / "COMPLETE").unlink()
    report = make_report(built.directory, [run])
    assert report.left_out == (f"{run} was never finished (it has no seal): left out",)
    assert "Beside other engines" not in report.sections


def test_an_older_reproduction_shows_what_it_keeps(tmp_path: Path) -> None:
    path = write_reproduction(tmp_path, sealed=False)
    ledger: dict[str, Any] = json.loads((path / "ledger.json").read_text(encoding="utf-8"))
    for key in ("near_duplicates", "shards", "blank_lines"):
        del ledger[key]
    (path / "ledger.json").write_text(json.dumps(ledger))
    seal(path)
    assert "data_repository" not in evaluation()
    html = page_text(path)
    assert "Near-duplicates are sought" not in html
    assert '<figure id="data-ledger"' in html
    assert Outline(html).balanced
