"""The totals of claims are the same wherever they stand, whatever was run before."""

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from mlm_repro.experiments.catalogue import every_claim
from mlm_repro.experiments.reproduce.files import ReproductionSummary
from mlm_repro.lineage.files import read_document
from tests.architecture.rooms import ROOT
from tests.commands import call
from tests.experiments.machines import with_gpus
from tests.reports.reproduction import write_reproduction
from tests.reports.runs import write_runs
from tests.reports.test_page import Outline

HEADS = ["scale", "confirmed", "contradicted", "predicted", "not tried"]
Totals = list[list[str]]


def of_markdown(page: Path) -> Totals:
    """The table of a page under the heads of the totals."""
    lines = page.read_text(encoding="utf-8").splitlines()
    rows = [
        [cell.strip() for cell in line[1:-1].split("|")] for line in lines if line.startswith("|")
    ]
    return rest(row for row in rows if not set("".join(row)) <= set("-: "))


def rest(rows: Iterable[list[str]]) -> Totals:
    """The rows under the heads, as many as there are of five cells and another scale."""
    every = list(rows)
    under = every[every.index(HEADS) + 1 :]
    scales = dict.fromkeys(row[0] for row in under if len(row) == len(HEADS))
    return under[: len(scales)][:5]


def of_page(html: str) -> Totals:
    return rest([" ".join(cell.split()) for cell in row] for row in Outline(html).rows)


def of_command(out: str) -> Totals:
    """The first table, whose columns begin under their heads."""
    head, *lines = out.split("\n\n")[0].splitlines()
    starts = [head.index(name) for name in HEADS]
    return [
        [line[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=True)]
        for line in lines
    ]


@pytest.fixture(scope="module")
def expected() -> Totals:
    return of_markdown(ROOT / "README.md")


def test_readme_has_every_scale_and_all_rows(expected: Totals) -> None:
    assert [row[0] for row in expected] == ["same", "reduced", "simulated", "arithmetic", "—"]
    counted = sum(
        int(number)
        for row in expected
        for number in re.findall(r"\((?:\d+ of )?(\d+)\)", " ".join(row))
    )
    assert 0.7 * len(every_claim()) < counted < len(every_claim())


def test_results_have_the_same_totals(expected: Totals) -> None:
    assert of_markdown(ROOT / "docs" / "results.md") == expected


@pytest.mark.parametrize("was_run", [False, True])
def test_compare_prints_the_same_totals(expected: Totals, was_run: bool, tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "results", tmp_path / "results", ignore=shutil.ignore_patterns("bench", "figures")
    )
    if was_run:
        write_runs(
            tmp_path / "runs", ["2021/table-1", "2021/figure-11", "2022/table-5", "zero/memory"]
        )
    machine = with_gpus(tmp_path / "bin", 0, 0)
    done = call(machine, "mlm-experiment", "compare", "--all", folder=tmp_path, ends=3)
    assert of_command(done.out) == expected


def test_the_page_of_kept_results_has_the_same_totals(expected: Totals, tmp_path: Path) -> None:
    machine = with_gpus(tmp_path / "bin", 0, 0)
    call(
        machine,
        "mlm-report",
        "build",
        "--kept",
        "--out",
        tmp_path / "page",
        folder=tmp_path,
        ends=0,
    )
    assert of_page((tmp_path / "page" / "index.html").read_text(encoding="utf-8")) == expected


def test_a_newcomer_s_page_has_the_same_totals(expected: Totals, tmp_path: Path) -> None:
    reproduction = write_reproduction(tmp_path / "runs")
    write_runs(tmp_path / "runs", ["2021/table-1", "2021/figure-11"])
    machine = with_gpus(tmp_path / "bin", 0, 0)
    call(machine, "mlm-report", "build", "runs", folder=tmp_path, ends=0)
    page = (reproduction / "report" / "index.html").read_text(encoding="utf-8")
    assert of_page(page) == expected
    places = re.findall(
        r'<li><a href="#([^"]+)">', page.partition("<header")[2].partition("</header>")[0]
    )
    assert places == [
        "reproduction",
        "run-reproduce-8.3b-65821716",
        "2019-size",
        "engines-section",
        "errata-section",
    ]
    assert all(f' id="{place}"' in page for place in places)
    kept = read_document(ROOT / "results" / "reproduce-8.3b" / "summary.json", ReproductionSummary)
    assert all(label in page.partition("</header>")[0] for label in kept.labels.values())
