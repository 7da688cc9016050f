"""`mlm-report` as a user runs it: output, warnings and exit codes."""

import subprocess
import sys
from pathlib import Path

from tests.reports.reproduction import write_reproduction


def _report(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from reports.cli import main; main()", "build", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def test_the_newest_reproduction_is_the_default(tmp_path: Path) -> None:
    path = write_reproduction(tmp_path / "runs")
    done = _report(cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert str(path / "report" / "index.html") in done.stdout
    assert done.stderr == ""


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    for arguments in ([], ["absent"], [str(tmp_path)], ["runs"]):
        done = _report(*arguments, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert len(done.stderr.splitlines()) == 1


def test_damage_is_named_on_a_page_that_is_written_all_the_same(tmp_path: Path) -> None:
    path = write_reproduction(tmp_path / "runs")
    with (path / "records.jsonl").open("a", encoding="utf-8") as file:
        file.write("not a record\n")
    done = _report(str(path), cwd=tmp_path)
    assert done.returncode == 6
    assert "warning: records.jsonl is not the file that was sealed" in done.stderr
    html = (path / "report" / "index.html").read_text(encoding="utf-8")
    assert "records.jsonl is not the file that was sealed" in html
    assert "is left out: it is not a record" in html
    assert '<figure id="2019-figure-6"' in html


def test_an_unreadable_summary_ends_with_6_and_no_page(tmp_path: Path) -> None:
    path = write_reproduction(tmp_path / "runs")
    (path / "summary.json").write_text("{")
    assert _report(str(path), cwd=tmp_path).returncode == 6
    assert not (path / "report").exists()
