"""`mlm-report watch`: what a run's files say, of a run at any stage, and a sentence where there is none."""

import os
import time
from pathlib import Path

import pytest
from rich.console import Console

from reports.watch import BARS, look_at, render_view, sparkline
from tests.commands import call
from tests.reports.reproduction import write_reproduction
from tests.reports.trained import write_run


def shown(run: Path) -> str:
    console = Console(width=110, record=True, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(render_view(look_at(run)))
    return console.export_text()


def test_a_finished_run_is_printed_once(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    done = call({}, "mlm-report", "watch", run)
    assert (done.code, done.err) == (0, "")
    assert f"{run.name}: complete" in done.out
    assert "40 of 40" in done.out
    assert "5.00" in done.out  # training loss
    assert "24.39" in done.out  # validation perplexity
    assert "2,048 tokens/s" in done.out
    assert "0:20" in done.out


def test_a_run_in_progress_has_a_time_left(tmp_path: Path) -> None:
    text = shown(write_run(tmp_path, iterations=15))
    assert "small-0123abcd: training" in text
    assert "15 of 40" in text
    assert "0:12" in text  # 25 iterations of half a second
    assert "after 10" in text


def test_a_run_that_is_silent_is_said_to_be(tmp_path: Path) -> None:
    run = write_run(tmp_path, iterations=15)
    old = time.time() - 600
    os.utime(run / "metrics.jsonl", (old, old))
    assert "nothing written for 10:0" in shown(run)


def test_a_run_that_has_not_begun_and_one_whose_file_is_torn(tmp_path: Path) -> None:
    run = write_run(tmp_path, iterations=15)
    (run / "metrics.jsonl").write_text('{"kind": "tra', encoding="utf-8")
    assert "The metrics of small-0123abcd are empty" in shown(run)
    (run / "metrics.jsonl").unlink()
    text = shown(run)
    assert "small-0123abcd: starting" in text
    assert "has written no metrics yet" in text


@pytest.mark.parametrize("case", ["absent", "folder", "reproduction", "damaged"])
def test_what_is_no_run_is_refused_in_one_sentence(case: str, tmp_path: Path) -> None:
    run = write_run(tmp_path)
    target, code, sentence = {
        "absent": (tmp_path / "small", 2, f"there is no run at {tmp_path / 'small'}; there is {run.name}"),
        "folder": (tmp_path, 2, "is not a run directory"),
        "reproduction": (write_reproduction(tmp_path / "r"), 2, "is not a training run but reproduction"),
        "damaged": (run, 6, "cannot be read"),
    }[case]
    if case == "damaged":
        (run / "manifest.json").write_text("{", encoding="utf-8")
    done = call({}, "mlm-report", "watch", target, ends=code)
    assert sentence in done.err
    assert len(done.err.splitlines()) == 1


def test_a_name_is_not_read_as_markup(tmp_path: Path) -> None:
    run = write_run(tmp_path, "[red]x")
    assert "[red]x-0123abcd: complete" in shown(run)


def test_a_sparkline_goes_from_the_least_to_the_greatest() -> None:
    assert sparkline([]) == ""
    assert sparkline([3.0, 3.0]) == "▄▄"
    assert sparkline([0.0, 7.0]) == BARS[0] + BARS[-1]
    assert sparkline(list(range(80)), 8) == BARS
