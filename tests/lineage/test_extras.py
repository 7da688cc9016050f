"""A library of an extra is imported when it is asked for, and named with its extra where it is
missing."""

import sys
from pathlib import Path

import pytest

from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.extras import import_extra


@pytest.mark.parametrize("module", ["ray", "ray.cluster_utils"])
def test_a_missing_library_is_named_with_its_extra(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for imported in [name for name in sys.modules if name.startswith("ray.")]:
        monkeypatch.delitem(sys.modules, imported)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        BadInput, match=r"^this command needs ray: pip install 'mlm-repro\[ray\]' \(.*ray.*\)$"
    ):
        import_extra(module, "ray")


def test_a_library_that_lacks_its_own_is_named_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_there.py").write_text("import not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        BadInput, match=r"this command needs half_there: .*mlm-repro\[eval\].*not_there"
    ):
        import_extra("half_there", "eval")
