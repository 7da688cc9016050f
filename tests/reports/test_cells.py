"""Edited numbers of a built report, sealed anew: each is named, wherever it stands."""

import base64
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lineage.cells import LINK, unbacked_numbers
from lineage.chain import broken_links
from lineage.digest import seal
from lineage.records import read_records, write_records
from tests.reports.conftest import Built

FIGURE, NUMBERS = "2019-figure-6.csv", "further-numbers.csv"


@pytest.fixture
def run(built: Built, tmp_path: Path) -> Path:
    """A copy of a reproduction with its report, beside the runs of experiments that the report shows."""
    shutil.copytree(built.directory.parent, tmp_path / "runs")
    return tmp_path / "runs" / built.directory.name


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8", errors="surrogateescape")


def in_the_data(run: Path) -> None:
    replace(run / "report" / "figures" / NUMBERS, ",302.4,", ",202.4,")


def in_the_table_of_the_page(run: Path) -> None:
    replace(run / "report" / "index.html", '<td class="number">302.4</td>', '<td class="number">202.4</td>')


def in_what_is_shown(run: Path) -> None:
    replace(run / "report" / "index.html", '<span class="value">907.2</span>', '<span class="value">17.4</span>')


def in_a_verdict(run: Path) -> None:
    text = (run / "report" / "index.html").read_text(encoding="utf-8")
    number = text.split('<a href="#run-experiment')[1].split("</a>")[0].split(">")[1]
    replace(run / "report" / "index.html", f">{number}</a>", ">12345.6</a>")


def in_what_is_given_out(run: Path) -> None:
    data = (run / "report" / "figures" / NUMBERS).read_bytes()
    old, new = (LINK + base64.b64encode(text).decode() for text in (data, data.replace(b"302.4", b"202.4")))
    replace(run / "report" / "index.html", old, new)


def of_another_kind(run: Path) -> None:
    replace(run / "report" / "figures" / FIGURE, ",scaled,", ",measured,")


def published(run: Path) -> None:
    replace(run / "report" / "figures" / FIGURE, ",20000,21.16,", ",20000,11.16,")


def records_edited(run: Path) -> None:
    records = read_records(run / "records.jsonl")
    changed = [one.model_copy(update={"value": 1.5}) if one.value == 302.4 else one for one in records]
    write_records(run / "records.jsonl", changed)


def records_edited_and_sealed(run: Path) -> None:
    records_edited(run)
    seal(run)


def an_experiment_lost(run: Path) -> None:
    for path in (run.parent / "experiments").glob("experiment-*"):
        shutil.rmtree(path)


def test_a_report_as_it_was_built_is_backed(run: Path) -> None:
    assert list(unbacked_numbers(run)) == []


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (in_the_data, f"report/figures/{NUMBERS} says 202.4 for 2019/validation 355m final_validation_perplexity"),
        (in_the_table_of_the_page, "report/index.html says 202.4 for 2019/"),
        (in_what_is_shown, "report/index.html shows 17.4 as scaled, which no record says"),
        (in_a_verdict, "report/index.html shows 12345.6 as "),
        (in_what_is_given_out, f"report/index.html gives out another {NUMBERS} than report/figures/{NUMBERS}"),
        (of_another_kind, "(measured), which no record says"),
        (published, "says 11.16 for 2019/figure-6 355m validation_perplexity at 20000 (published)"),
        (records_edited, "says 302.4 for 2019/validation 355m final_validation_perplexity (scaled), which no record"),
        (
            records_edited_and_sealed,
            "says 302.4 for 2019/validation 355m final_validation_perplexity (scaled), which no record",
        ),
        (an_experiment_lost, "(simulated), which no record says, nor"),
        (an_experiment_lost, "report was made of the run ../experiments/experiment-"),
    ],
)
def test_a_number_that_no_record_backs_is_named(edit: Callable[[Path], None], sentence: str, run: Path) -> None:
    edit(run)
    seal(run / "report")
    assert [found for found in unbacked_numbers(run) if sentence in found], list(unbacked_numbers(run))


def test_the_chain_of_a_run_goes_to_the_cells_of_its_report(run: Path) -> None:
    in_the_data(run)
    assert [found for found in broken_links(run) if f"report/figures/{NUMBERS} says 202.4" in found]
