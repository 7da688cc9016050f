"""A run directory: the same work is found again, other work never touches it."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlm_repro.lineage.atomic import write_json
from mlm_repro.lineage.chain import broken_links
from mlm_repro.lineage.digest import check_seal, sha256_json
from mlm_repro.lineage.environment import describe_environment
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from mlm_repro.lineage.files import Manifest, read_document
from mlm_repro.lineage.run import MANIFEST, RunDirectory, identity_in

WORK: dict[str, Any] = {
    "name": "work",
    "kind": "training",
    "config": {"train": {"iterations": 3}, "data": None},
    "parents": {"dataset": "abc"},
}


def begin(root: Path, **changes: Any) -> RunDirectory:
    return RunDirectory.begin(root, **(WORK | changes))


def test_the_same_work_has_the_same_directory_and_keeps_its_manifest(tmp_path: Path) -> None:
    first = begin(tmp_path)
    before = (first.path / MANIFEST).read_bytes()
    again = begin(tmp_path)
    assert again == first
    assert (again.path / MANIFEST).read_bytes() == before


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "data"},
        {"config": {"train": {"iterations": 4}, "data": None}},
        {"config": {"train": {"iterations": 3}, "data": "x"}},
        {"settings": {"train": {"iterations": 4}}},
        {"parents": {"dataset": "abd"}},
        {"parents": {"dataset": "abc", "other": "x"}},
        {"parents": {}},
    ],
    ids=str,
)
def test_other_work_has_another_directory(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert begin(tmp_path, **changes).path != begin(tmp_path).path


def test_another_release_of_the_package_is_the_same_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = begin(tmp_path)
    assert before.other_code == ""
    later = describe_environment().model_copy(
        update={"mlm_repro": "9.9.9", "source": {"commit": "f" * 40}}
    )
    monkeypatch.setattr("mlm_repro.lineage.run.describe_environment", lambda: later)
    again = begin(tmp_path)
    assert (again.path, again.is_new) == (before.path, False)
    assert again.other_code.endswith(", and here is mlm-repro 9.9.9 at ffffffffffff")


def test_each_attempt_names_its_code_and_the_attempt_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin(tmp_path)
    run.note_attempt(0, {"tp": 1}, 1)
    run.note_attempt(7, {"tp": 1}, 1)
    assert (broken_links(run.path), run.other_code) == ([], "")
    monkeypatch.setattr("mlm_repro.lineage.run.code_digest", lambda: "f" * 64)
    assert "(code ffffffff)" in run.other_code
    run.note_attempt(9, {"tp": 2}, 2)
    assert (broken_links(run.path), run.other_code) == ([], "")
    manifest = read_document(run.path / MANIFEST, Manifest)
    assert [each.iteration for each in manifest.attempts] == [0, 7, 9]
    first, second, third = manifest.attempts
    assert first.code == second.code != third.code
    for forge in ({"code": second.code}, {"iteration": 8}, {"before": ""}):
        for number in range(2 if "before" not in forge else 3):
            values = manifest.to_json()
            values["attempts"][number] |= forge
            write_json(run.path / MANIFEST, values)
            differs = values != manifest.to_json()
            assert bool(broken_links(run.path)) == differs, (forge, number)
    values = manifest.to_json()
    values["attempts"].pop(1)
    write_json(run.path / MANIFEST, values)
    assert any("attempt 2" in sentence for sentence in broken_links(run.path))


def test_another_schema_is_other_work(tmp_path: Path) -> None:
    assert begin(tmp_path, schema=2).path != begin(tmp_path).path


def test_what_is_equal_to_its_default_does_not_count(tmp_path: Path) -> None:
    settings = {"train": {"iterations": 3}}
    before = begin(tmp_path, settings=settings)
    more = {"train": {"iterations": 3, "new": 1}, "data": None, "other": {}}
    assert begin(tmp_path, settings=settings, config=more).path == before.path
    assert begin(tmp_path, settings={"train": {"iterations": 3, "new": 2}}).path != before.path
    assert (
        begin(tmp_path, settings=settings | {"data": "x"}, without=frozenset({"data"})).path
        == before.path
    )


def test_a_manifest_of_the_first_release_keeps_its_identity() -> None:
    manifest = {
        "kind": "training",
        "config": {"a": 1, "data": 2},
        "outside_identity": ["data"],
        "parents": {},
        "environment": {"mlm_repro": "0.1.0"},
    }
    what = {"kind": "training", "config": {"a": 1}, "parents": {}, "version": "0.1.0"}
    assert identity_in(manifest) == sha256_json(what)


def test_the_manifest_says_what_went_in_and_what_it_ran_on(tmp_path: Path) -> None:
    run = begin(tmp_path)
    manifest = json.loads((run.path / MANIFEST).read_text(encoding="utf-8"))
    assert {key: manifest[key] for key in WORK} == WORK
    assert manifest["config_digest"] == sha256_json(WORK["config"])
    assert run.path.name == f"work-{manifest['identity'][:8]}"
    assert len(manifest["identity"]) == 64
    assert {"mlm_repro", "source", "python", "platform", "cpu", "cores", "packages"} <= manifest[
        "environment"
    ].keys()
    assert manifest["created"].endswith("+00:00")


def test_completing_seals_and_links(tmp_path: Path) -> None:
    run = begin(tmp_path)
    (run.path / "result").write_text("42")
    assert not run.is_complete
    assert not (tmp_path / "work").exists()
    digest = run.complete()
    assert run.is_complete
    assert digest == run.digest == check_seal(run.path)
    assert RunDirectory.open(tmp_path / "work").path == run.path.resolve()


def test_the_link_names_the_newest_complete_run(tmp_path: Path) -> None:
    first, second, third = (begin(tmp_path, parents={"dataset": letter}) for letter in "abc")
    first.complete()
    second.complete()
    assert (tmp_path / "work").resolve() == second.path.resolve()
    assert not third.is_complete, "an unfinished run is never linked"
    first.link()
    assert (tmp_path / "work").resolve() == first.path.resolve()
    assert second.is_complete


def test_a_long_name_fits_or_leaves_nothing(tmp_path: Path) -> None:
    """Of a name that the file system took for the directory alone a directory was left."""
    run = RunDirectory.begin(tmp_path / "kept", "ä" * 100, "training", {}, {})
    run.complete()
    assert RunDirectory.open_named(tmp_path / "kept", "ä" * 100).is_complete
    for letters in (101, 123, 5_000):
        with pytest.raises(
            BadInput, match=f"the run's name has {2 * letters} bytes: give it one of at most 200, "
        ):
            RunDirectory.begin(tmp_path / "refused", "ä" * letters, "training", {}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_name_stays_with_its_kind(tmp_path: Path) -> None:
    """A training named like its dataset would take the place that other trainings read the dataset
    from."""
    begin(tmp_path, kind="data").complete()
    with pytest.raises(
        BadInput, match="work is the name of a data run: give this training run another name"
    ):
        begin(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if not path.is_symlink()] == [
        (tmp_path / "work").resolve().name
    ]


def test_the_link_is_relative_so_that_the_folder_can_be_moved(tmp_path: Path) -> None:
    begin(tmp_path / "here").complete()
    (tmp_path / "here").rename(tmp_path / "there")
    assert RunDirectory.open(tmp_path / "there" / "work").is_complete
    with pytest.raises(BadInput, match=f"it has no {MANIFEST}; there is work$"):
        RunDirectory.open(tmp_path / "there" / "wrk")


def test_a_real_directory_in_the_links_place_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "precious").write_text("precious")
    run = begin(tmp_path)
    run.complete()
    assert run.is_complete
    assert (tmp_path / "work" / "precious").read_text() == "precious"


@pytest.mark.parametrize("content", [b"{", b"\xff", b"3", b""])
def test_a_damaged_manifest_is_an_integrity_failure(tmp_path: Path, content: bytes) -> None:
    run = begin(tmp_path)
    (run.path / MANIFEST).write_bytes(content)
    with pytest.raises(IntegrityFailure, match=MANIFEST):
        RunDirectory.open(run.path)
