"""The numbers README shows are those of the result files, and none is typed."""

from pathlib import Path

import pytest

from experiments.readme import BEGIN, END, results_block, rewrite
from lineage.digest import check_seal
from lineage.errors import BadInput

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results" / "reproduce-8.3b"


def test_readme_shows_the_result_files() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert rewrite(readme, results_block(RESULTS)) == readme


def test_the_result_files_are_what_was_written() -> None:
    check_seal(RESULTS)


def test_a_changed_number_would_be_noticed() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = results_block(RESULTS)
    changed = readme.replace("| 8.3b twin, scaled | 3", "| 8.3b twin, scaled | 4")
    assert changed != readme
    assert rewrite(changed, block) == readme


def test_a_readme_without_markers_is_refused() -> None:
    with pytest.raises(BadInput, match="README has no"):
        rewrite(f"{BEGIN} only", "block")
    assert rewrite(f"a{BEGIN}b{END}c", "block") == f"a{BEGIN}\nblock\n{END}c"
