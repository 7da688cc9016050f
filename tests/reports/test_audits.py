"""The page shows the audits that lie beside its reproduction, and names those that it cannot show."""

from pathlib import Path
from typing import Any

from markupsafe import Markup

from lineage.atomic import write_json
from lineage.digest import sha256_file
from lineage.receipt import AUDIT, STATEMENT, signature_of
from reports.audits import receipts_beside
from reports.page import render_page
from reports.render import Drawing
from reports.report import Inputs, Report, assemble
from tests.reports.reproduction import HOSTILE, run_name, write_reproduction

NUMERICS = {"processor": HOSTILE.replace("\ud800", ""), "torch": "2.13.0"}
KEY = "81b695480b9692ec" * 4


def write_receipt(folder: Path, name: str, run: str, complete: str, **audit: Any) -> Path:
    path = folder / f"{name}.receipt.json"
    predicate = {"verb": "replay", "run": run, "differs": [], "segments_in_all": 12, "layout": "serial"} | audit
    subject = [{"name": "COMPLETE", "digest": {"sha256": complete}}]
    write_json(path, {"_type": STATEMENT, "subject": subject, "predicateType": AUDIT, "predicate": predicate})
    return path


def made(reproduction: Path) -> Report:
    return assemble(Inputs(reproduction, mixed_commits=True, receipts=receipts_beside(reproduction)))


def test_what_was_audited_by_whom_on_what(tmp_path: Path) -> None:
    reproduction = write_reproduction(tmp_path)
    segments = [{"start": 0, "end": 50, "differs": []}, {"start": 100, "end": 150, "differs": []}]
    signed = write_receipt(tmp_path, "a", run_name("2.5b"), "0" * 64, segments=segments, numerics=NUMERICS)
    write_json(signature_of(signed), {"verificationMaterial": {"publicKey": {"hint": KEY}}})
    write_receipt(tmp_path, "b", reproduction.name, sha256_file(reproduction / "COMPLETE"), verb="run", differs=["it"])
    write_receipt(tmp_path, "c", "another-run-1a2b3c4d", "0" * 64)
    report = made(reproduction)
    assert report.problems == assemble(Inputs(reproduction, mixed_commits=True)).problems
    (exhibit,) = [each for each in report.all_exhibits if each.name == "audits"]
    one, other = exhibit.data.rows
    assert one[:5] == [run_name("2.5b"), "replay", "nothing differs", "2 of 12: 1–50, 101–150", "serial"]
    assert (one[6], one[-1]) == ("2.13.0", KEY[:16])
    assert (other[:3], other[-1]) == ([reproduction.name, "run", "it"], "not signed")
    assert report.inputs.sources.receipts == [f"../{name}.receipt.json" for name in "abc"]
    empty = Drawing((Markup("<svg></svg>"),), b"")
    page = render_page(report, {each.name: empty for each in report.all_exhibits})
    assert "Audits of the runs" in page
    assert "<script>alert" not in page


def test_receipts_that_cannot_be_shown(tmp_path: Path) -> None:
    reproduction = write_reproduction(tmp_path)
    before = assemble(Inputs(reproduction, mixed_commits=True)).problems
    write_receipt(tmp_path, "a", reproduction.name, "0" * 64)
    (tmp_path / "b.receipt.json").write_text("{}")
    report = made(reproduction)
    assert "audits" not in [exhibit.name for exhibit in report.all_exhibits]
    other, damaged = report.problems[len(before) :]
    assert other.sentence == f"The receipt a.receipt.json is not for {reproduction.name} as it is."
    assert "b.receipt.json is not a receipt" in damaged.sentence
