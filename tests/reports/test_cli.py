"""`mlm-report` as a user runs it: output, warnings and exit codes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.shipped import HOME
from mlm_repro.reports.experiment_runs import sort_runs
from tests.reports.reproduction import WITHOUT_TORCH, write_reproduction
from tests.reports.runs import write_runs


def _report(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, "build", *arguments]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False
    )


def test_a_folder_gives_its_newest_reproduction_and_experiments(tmp_path: Path) -> None:
    path = write_reproduction(tmp_path / "runs")
    older, newer = (
        write_runs(tmp_path / name, ["2021/figure-7"])[0] for name in ("elsewhere", "runs")
    )
    older = older.rename(tmp_path / "runs" / "experiment-2021-figure-7-00000000")
    assert sort_runs([tmp_path / "runs"]) == (path, [newer])
    assert sort_runs([path, older]) == (path, [older])
    for wrong in ([older], [path, write_reproduction(tmp_path / "other")]):
        with pytest.raises(BadInput, match="one reproduction"):
            sort_runs(wrong)
    done = _report(cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table = path / "report" / "figures" / "2021-figure-7.csv"
    assert table.read_text(encoding="utf-8").count(",simulated,") == 5


def test_the_newest_reproduction_is_the_default(tmp_path: Path) -> None:
    path = write_reproduction(tmp_path / "runs")
    done = _report(cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert str(path / "report" / "index.html") in done.stdout
    assert re.fullmatch(
        r"cost: draws \d+ figures, writes \d+ exhibits", done.stderr.splitlines()[0]
    )


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    for arguments in ([], ["absent"], [str(tmp_path)], ["runs"]):
        done = _report(*arguments, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert len(done.stderr.splitlines()) == 1


def test_damage_is_named_and_no_page_is_written(tmp_path: Path) -> None:
    path = write_reproduction(tmp_path / "runs")
    with (path / "records.jsonl").open("a", encoding="utf-8") as file:
        file.write("not a record\n")
    done = _report(str(path), cwd=tmp_path)
    assert done.returncode == 6
    (line,) = done.stderr.splitlines()
    assert "records.jsonl was changed after reproduce-8.3b" in line
    assert not (path / "report").exists()


def test_an_unfinished_run_is_left_out_and_named(tmp_path: Path) -> None:
    path = write_reproduction(tmp_path / "runs")
    (run,) = write_runs(tmp_path / "runs", ["2021/figure-7"])
    (run / "COMPLETE").unlink()
    done = _report(cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^warning: .*{run.name} was never finished", done.stderr, re.MULTILINE)
    assert f"{run.name} was never finished" in (path / "report" / "index.html").read_text(
        encoding="utf-8"
    )


def test_kept_results_are_shown_elsewhere_and_nothing_is_replaced(tmp_path: Path) -> None:
    full, mine = tmp_path / "page", tmp_path / "mine"
    assert _report("--kept", cwd=tmp_path).returncode == 2
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    for wrong in ("--kept", f"{HOME}/results/reproduce-8.3b"):
        done = _report(wrong, "--out", str(mine), cwd=tmp_path)
        assert (done.returncode, (mine / "notes.txt").read_text()) == (2, "mine"), done.stderr
    done = _report("--kept", "--out", str(full), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    html = (full / "index.html").read_text(encoding="utf-8")
    for part in ("2019-figure-6", "engines", "errata", "2022-activations"):
        assert f'id="{part}"' in html, part
    assert not (HOME / "results" / "reproduce-8.3b" / "report").exists()
