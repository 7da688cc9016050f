"""Results of `mlm-bench` as files: what is refused, and in which words."""

import json
from pathlib import Path

import pytest

from lineage.benchmark import read_benchmark
from lineage.errors import BadInput


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a result of mlm-bench"),
        ('{"benchmark": "gemm", "points": []}', "measure again with `mlm-bench gemm --json`"),
        ('{"benchmark": "gemm", "title": "Products", "cases": []}', "cases"),
        ('{"benchmark": "gemm", "title": "Products", "cases": [{"name": "a", "ratio": 1}]}', "ratio"),
    ],
)
def test_a_file_that_is_no_result_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=said):
        read_benchmark(path)


def test_a_result_is_read(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"benchmark": "gemm", "title": "Products", "cases": [{"name": "512"}]}))
    assert read_benchmark(path).cases[0].name == "512"
