"""A rival whose library is not installed is left out, and the note says what installs it."""

import sys
from pathlib import Path

import pytest

from experiments.bench.benchmarks.eval import has_harness
from experiments.bench.benchmarks.parallel import contenders
from experiments.bench.contender import bench_size, left_out, read_size
from experiments.bench.contenders.peers import build_huggingface
from experiments.bench.contenders.scorers import harness
from lineage.errors import BadInput


@pytest.mark.parametrize("blocked", ["transformers", "lm_eval"])
def test_the_harness(blocked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for imported in [name for name in sys.modules if name.startswith(f"{blocked}.")]:
        monkeypatch.delitem(sys.modules, imported)
    monkeypatch.setitem(sys.modules, blocked, None)
    assert not has_harness()
    with pytest.raises(BadInput, match=rf"this needs {blocked}: pip install 'mlm-repro\[eval\]'"):
        harness(tmp_path, 8)


def test_hugging_face(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    rivals = [each for each in contenders() if each.build is build_huggingface]
    assert not any(each.is_installed for each in rivals)
    why = "not installed: pip install 'mlm-repro[bench]'"
    assert left_out(contenders()) == dict.fromkeys((each.name for each in rivals), why)
    size = bench_size("twin", read_size("twin").model, batch=2, iterations=1, warm_up=0)
    with pytest.raises(BadInput, match=r"this needs transformers: pip install 'mlm-repro\[bench\]'"):
        build_huggingface(rivals[0], size)
