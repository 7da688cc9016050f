"""Files that have no end, or lead in circles, are refused in a sentence and within a moment."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mlm_repro.lineage.atomic import read_bytes
from mlm_repro.lineage.config import LONGEST_CHAIN, read_toml
from mlm_repro.lineage.digest import check_seal, seal
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from mlm_repro.lineage.run import RunDirectory


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def make_empty(directory: Path, make: Callable[[Path], None]) -> Path:
    """A directory whose manifest is made so."""
    directory.mkdir()
    make(directory / "manifest.json")
    return directory


def large(path: Path) -> None:
    path.write_bytes(b"#" * (2 << 20))


@pytest.mark.parametrize("make", [endless, pipe, large])
@pytest.mark.parametrize("extended", [False, True])
def test_a_configuration_without_end_is_refused(
    make: Callable[[Path], None], extended: bool, tmp_path: Path
) -> None:
    file = tmp_path / "config.toml"
    make(tmp_path / "other.toml" if extended else file)
    if extended:
        file.write_text('extends = "other.toml"\n')
    with pytest.raises(BadInput, match="cannot be read: it "):
        read_toml(file)


@pytest.mark.parametrize(
    "text", ["a." * 5000 + "a = 1", "[" + "a." * 5000 + "a]", "x = {" + "a . " * 5000 + "a = 1}"]
)
def test_tables_inside_of_tables_without_end_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(BadInput, match="a key inside of more than 63 tables"):
        read_toml(file)


def test_a_chain_of_configurations_has_an_end(tmp_path: Path) -> None:
    for number in range(LONGEST_CHAIN + 2):
        (tmp_path / f"{number}.toml").write_text(f'extends = "{number + 1}.toml"\n')
    with pytest.raises(BadInput, match=f"`extends` goes on for more than {LONGEST_CHAIN} files"):
        read_toml(tmp_path / "0.toml")


def test_what_is_read_whole_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bytes(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_bytes(tmp_path / "file", 4)


@pytest.mark.parametrize("make", [endless, pipe])
@pytest.mark.parametrize("name", ["manifest.json", "data"])
def test_a_run_with_such_a_file_is_refused(
    make: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "data").write_bytes(b"")
    seal(tmp_path)
    (tmp_path / name).unlink()
    make(tmp_path / name)
    with pytest.raises(IntegrityFailure, match=name):
        check_seal(tmp_path)
    with pytest.raises(BadInput, match="is not a run directory"):
        RunDirectory.open(make_empty(tmp_path / "elsewhere", make))


def test_links_that_lead_in_circles_are_refused(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "file").write_text("text")
    seal(tmp_path)
    for name in ("a", "b"):
        (inside / name).symlink_to(".")
    with pytest.raises(IntegrityFailure, match="is a link to a directory without a COMPLETE file"):
        check_seal(tmp_path)
