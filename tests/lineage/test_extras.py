"""A library of an extra is imported when it is asked for, and named with its extra where it is missing."""

import subprocess
import sys
from pathlib import Path

import pytest

from lineage.errors import BadInput
from lineage.extras import import_extra


@pytest.mark.parametrize("module", ["ray", "ray.cluster_utils"])
def test_a_missing_library_is_named_with_its_extra(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for imported in [name for name in sys.modules if name.startswith("ray.")]:
        monkeypatch.delitem(sys.modules, imported)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BadInput, match=r"^this needs ray: pip install 'mlm-repro\[ray\]' \(.*ray.*\)$"):
        import_extra(module, "ray")


def test_a_library_that_lacks_its_own_is_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_there.py").write_text("import not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadInput, match=r"this needs half_there: .*mlm-repro\[eval\].*not_there"):
        import_extra("half_there", "eval")


WITHOUT = """
import importlib, sys
module, function, *blocked = sys.argv.pop(1).split(":")
sys.modules |= dict.fromkeys(blocked)
getattr(importlib.import_module(module), function)()
"""


def test_a_command_without_its_library_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one two three"}\n', encoding="utf-8")
    arguments = ["clean", "jsonl:a.jsonl", "out", "--executor", "ray", "--quiet"]
    command = [sys.executable, "-c", WITHOUT, "data_pipeline.cli:main:ray", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: this needs ray: pip install 'mlm-repro[ray]' (")
    assert done.stderr.count("\n") == 1
