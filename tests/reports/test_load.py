"""What makes a directory a reproduction, and what becomes of files and records that cannot be
used."""

import json
from pathlib import Path

import pytest

from mlm_repro.lineage.digest import seal
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from mlm_repro.lineage.records import RECORDS
from mlm_repro.reports.load import load_reproduction, newest_reproduction
from tests.reports.reproduction import write_reproduction


@pytest.mark.parametrize(
    "wrong", [b'{"series": "8.3', b'{"series": "no such record"}', b"\xff\xfe"]
)
def test_corrupted_records_are_refused_with_the_line_that_is_wrong(
    wrong: bytes, tmp_path: Path
) -> None:
    path = write_reproduction(tmp_path, sealed=False)
    lines = (path / RECORDS).read_bytes().splitlines()
    (path / RECORDS).write_bytes(b"\n".join([*lines[:2], wrong, lines[3]]))
    seal(path)
    with pytest.raises(BadInput, match=RECORDS):
        load_reproduction(path)


@pytest.mark.parametrize("changes", [{"source": " "}, {"kind": "scaled", "source": "x"}])
def test_a_number_without_an_origin_is_refused(changes: dict[str, str], tmp_path: Path) -> None:
    path = write_reproduction(tmp_path, sealed=False)
    lines = (path / RECORDS).read_text(encoding="utf-8").splitlines()
    lines[2] = json.dumps(json.loads(lines[2]) | changes)
    (path / RECORDS).write_text("\n".join(lines), encoding="utf-8")
    seal(path)
    with pytest.raises(
        IntegrityFailure, match=f"line 3 of {RECORDS} in .* has no source, or .* has no digest"
    ):
        load_reproduction(path)


@pytest.mark.parametrize(
    "name",
    [
        "records.jsonl",
        "summary.json",
        "ledger.json",
        "dataset.json",
        "evaluations.jsonl",
        "scores.json",
    ],
)
def test_a_damaged_file_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    path = write_reproduction(tmp_path)
    (path / name).write_text('{"models": [{}]}', encoding="utf-8")
    with pytest.raises(
        IntegrityFailure, match=rf"{name} was (changed|added) after {path.name} was sealed"
    ):
        load_reproduction(path)
    seal(path)
    with pytest.raises((BadInput, IntegrityFailure), match=name):
        load_reproduction(path)


def test_what_is_not_a_reproduction_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is not a run directory"):
        load_reproduction(tmp_path / "nothing")
    with pytest.raises(BadInput, match="has not finished"):
        load_reproduction(write_reproduction(tmp_path, sealed=False))


@pytest.mark.parametrize("text", ["{", "[]", '{"target": "8.3b", "mode": "imagined"}'])
def test_an_unreadable_summary_is_an_integrity_failure(tmp_path: Path, text: str) -> None:
    path = write_reproduction(tmp_path)
    (path / "summary.json").write_text(text)
    seal(path)
    with pytest.raises(IntegrityFailure, match=r"summary\.json"):
        load_reproduction(path)


def test_the_newest_complete_reproduction_is_found(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no complete reproduction"):
        newest_reproduction(tmp_path)
    write_reproduction(tmp_path, "reproduce-8.3b-00000001", sealed=False)
    with pytest.raises(BadInput, match="1 unfinished"):
        newest_reproduction(tmp_path)
    write_reproduction(tmp_path, "reproduce-8.3b-ffffffff")
    newer = write_reproduction(tmp_path, "reproduce-8.3b-11111111", sealed=False)
    manifest = json.loads((newer / "manifest.json").read_text(encoding="utf-8"))
    (newer / "manifest.json").write_text(
        json.dumps({**manifest, "created": "2026-01-01T00:00:00+00:00"})
    )
    seal(newer)
    (tmp_path / "reproduce-8.3b").symlink_to("reproduce-8.3b-ffffffff")
    assert newest_reproduction(tmp_path) == newer


@pytest.mark.parametrize("name", ["../../../x", "/etc", "..", ".hidden", "a/b", ""])
def test_a_model_is_not_named_like_another_folder(name: str, tmp_path: Path) -> None:
    path = write_reproduction(tmp_path, sealed=False)
    summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    summary["models"][0]["name"] = name
    (path / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    seal(path)
    with pytest.raises(IntegrityFailure, match="models"):
        load_reproduction(path)
