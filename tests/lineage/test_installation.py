"""An installed wheel is known by its build."""

from pathlib import Path

import pytest

from lineage import environment, shipped
from lineage.shipped import wheel_state


def test_a_build_stands_for_the_commit_and_another_has_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "HOME", tmp_path)
    monkeypatch.setattr(environment, "HOME", tmp_path)
    record = tmp_path / "mlm_repro-9.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("lineage/errors.py,sha256=abc,3\n", encoding="utf-8")
    build = environment.source_state()["commit"]
    assert (build.startswith("wheel-"), len(build)) == (True, 40)
    record.write_text("lineage/errors.py,sha256=abd,3\n", encoding="utf-8")
    assert wheel_state()["commit"] != build
