"""An installed wheel is known by its build and sees a changed file."""

import base64
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lineage import environment, installation
from lineage.installation import recorded_files, wheel_state

FILES = {
    "lineage/errors.py": b"code = 6\n",
    "experiments/models/8.3b.toml": b'name = "8.3b"\n',
    "experiments/claims/a.csv": b"id\n",
    "mlm_repro-9.dist-info/METADATA": b"Metadata-Version: 2.1\nName: mlm-repro\nVersion: 9\n",
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with an installed wheel, from which the code seems to run."""
    rows = [
        "../../bin/mlm-data,sha256=abc,3",
        "lineage/__pycache__/errors.cpython-311.pyc,,",
        "mlm_repro-9.dist-info/RECORD,,",
    ]
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        rows.append(f"{name},sha256={digest},{len(content)}")
    (tmp_path / "mlm_repro-9.dist-info" / "RECORD").write_text("\n".join(rows) + "\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(installation, "HOME", tmp_path)
    monkeypatch.setattr(environment, "HOME", tmp_path)
    recorded_files.cache_clear()
    yield tmp_path
    recorded_files.cache_clear()


def test_files_of_our_packages_are_known(site: Path) -> None:
    assert recorded_files().keys() == {name for name in FILES if "dist-info" not in name}


def test_a_build_stands_for_the_commit_and_a_change_is_seen(site: Path) -> None:
    build = environment.source_state()
    assert str(build["commit"]).startswith("wheel-")
    assert len(build["commit"]) == 40
    assert build["dirty"] is False
    (site / "lineage" / "errors.py").write_bytes(b"code = 5\n")
    assert wheel_state() == build | {"dirty": True}
    (site / "lineage" / "errors.py").unlink()
    assert wheel_state() == build | {"dirty": True}


def test_another_build_has_another_name(site: Path) -> None:
    build = wheel_state()["commit"]
    record = site / "mlm_repro-9.dist-info" / "RECORD"
    record.write_text(record.read_text(encoding="utf-8").replace("sha256=", "sha256=A"), encoding="utf-8")
    recorded_files.cache_clear()
    assert wheel_state()["commit"] != build


def test_a_clone_is_no_wheel() -> None:
    recorded_files.cache_clear()
    assert (recorded_files(), wheel_state()) == ({}, {})


def test_a_wheel_that_lies_elsewhere_is_not_asked(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "HOME", site / "elsewhere")
    assert recorded_files() == {}
