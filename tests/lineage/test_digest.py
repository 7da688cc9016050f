"""A sealed directory tells every change made to it afterwards, by the name of the file."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mlm_repro.lineage.digest import (
    MARKER,
    check_seal,
    content_digest,
    read_digest,
    seal,
    sha256_file,
    sha256_json,
)
from mlm_repro.lineage.errors import IntegrityFailure


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two levels of files, sealed."""
    path = tmp_path / "run"
    (path / "folder").mkdir(parents=True)
    (path / "first.bin").write_bytes(bytes(range(256)) * 100)
    (path / "folder" / "second.txt").write_text("second")
    (path / "empty").write_bytes(b"")
    seal(path)
    return path


def flip_bit(path: Path) -> None:
    content = bytearray((path / "first.bin").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "first.bin").write_bytes(content)


def edit_marker(path: Path) -> None:
    marker = json.loads((path / MARKER).read_text())
    marker["files"]["empty"]["bytes"] = 1
    (path / MARKER).write_text(json.dumps(marker))


CHANGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("one flipped bit", flip_bit, "first.bin was changed"),
    ("appended", lambda path: (path / "empty").write_bytes(b"x"), "empty was changed"),
    (
        "removed",
        lambda path: (path / "folder" / "second.txt").unlink(),
        "folder/second.txt is missing",
    ),
    ("added", lambda path: (path / "folder" / "third").write_text(""), "folder/third was added"),
    ("marker edited", edit_marker, "marker"),
    ("marker not JSON", lambda path: (path / MARKER).write_text("{"), MARKER),
    (
        "a report deeper down",
        lambda path: (path / "folder" / "report").write_text(""),
        "folder/report was added",
    ),
    ("marker removed", lambda path: (path / MARKER).unlink(), MARKER),
    ("linked to nothing", lambda path: (path / "added").symlink_to("nothing"), "added"),
]


@pytest.mark.parametrize(
    ("change", "named"), [item[1:] for item in CHANGES], ids=[item[0] for item in CHANGES]
)
def test_a_change_is_named(directory: Path, change: Callable[[Path], object], named: str) -> None:
    assert check_seal(directory) == read_digest(directory)
    change(directory)
    with pytest.raises(IntegrityFailure) as caught:
        check_seal(directory)
    assert named in str(caught.value)
    assert str(directory) in str(caught.value)


@pytest.mark.parametrize("name", ["\\ud800", "../first.bin", "x" * 5000])
def test_a_marker_that_names_what_no_file_is_called_is_edited(directory: Path, name: str) -> None:
    marker = directory / MARKER
    marker.write_text(
        marker.read_text(encoding="utf-8").replace("first.bin", name), encoding="utf-8"
    )
    with pytest.raises(IntegrityFailure, match="was edited"):
        check_seal(directory)


@pytest.mark.parametrize(
    "place", ["report/index.html", "report/deep/er", "wandb/log", "mlflow/0/meta", ".hidden"]
)
def test_derived_and_hidden_files_are_not_covered(directory: Path, place: str) -> None:
    (directory / place).parent.mkdir(parents=True, exist_ok=True)
    (directory / place).write_text("derived")
    assert check_seal(directory) == read_digest(directory)


def test_seals_chain_through_nested_directories(tmp_path: Path) -> None:
    def build(root: Path, text: str) -> Path:
        inner = root / "inner"
        inner.mkdir(parents=True)
        (inner / "file").write_text(text)
        (root / "other").write_text("other")
        seal(inner)
        seal(root)
        return root

    first, same, different = (
        build(tmp_path / "first", "a"),
        build(tmp_path / "same", "a"),
        build(tmp_path / "other", "b"),
    )
    assert check_seal(first) == check_seal(same) != check_seal(different)
    assert set(json.loads((first / MARKER).read_text())["files"]) == {"inner/COMPLETE", "other"}

    (first / "inner" / "file").write_text("c")
    with pytest.raises(IntegrityFailure, match="inner/file was changed"):
        check_seal(first / "inner")
    seal(first / "inner")
    with pytest.raises(IntegrityFailure, match="inner/COMPLETE was changed"):
        check_seal(first)


def test_content_without_a_file_has_the_same_digest_when_only_that_file_differs(
    tmp_path: Path,
) -> None:
    for name, created in (("a", "today"), ("b", "yesterday")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text("text")
        (tmp_path / name / "manifest").write_text(created)
        seal(tmp_path / name)
    digests = [content_digest(tmp_path / name, {"manifest"}) for name in "ab"]
    assert digests[0] == digests[1]
    assert read_digest(tmp_path / "a") != read_digest(tmp_path / "b")
    assert content_digest(tmp_path / "a", {"text"}) != content_digest(tmp_path / "b", {"text"})


def test_digests_are_plain_sha256(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    assert sha256_file(tmp_path / "file") == hashlib.sha256(b"abc").hexdigest()
    assert (
        sha256_json({"b": [1, "é"], "a": None})
        == hashlib.sha256('{"a":null,"b":[1,"é"]}'.encode()).hexdigest()
    )


def test_a_number_that_json_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        sha256_json({"a": float("inf")})
