"""README is short, shows what commands and result files say, and nothing in it is typed."""

import re
from pathlib import Path

import pytest

from docs.hooks.readme import CONSOLE, PICTURE, RESULTS, Kept, draw, results_block, rewrite
from lineage.digest import check_seal
from lineage.errors import BadInput

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
MOST_WORDS = 700


def test_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").split()) <= MOST_WORDS


def test_every_block_is_what_its_command_writes() -> None:
    readme = README.read_text(encoding="utf-8")
    assert len(CONSOLE.findall(readme)) == 1
    assert rewrite(readme) == readme


def test_a_changed_number_is_noticed() -> None:
    readme = README.read_text(encoding="utf-8")
    first = re.findall(r"\b\d+\.\d{3}\b", results_block(Kept(RESULTS)))[0]
    for number in (first, "bubble 0"):
        changed = readme.replace(number, number[:-1] + str((int(number[-1]) + 7) % 10), 1)
        assert changed != readme
        assert rewrite(changed) == readme


def test_the_picture_is_what_its_command_draws(tmp_path: Path) -> None:
    assert f"({PICTURE.relative_to(ROOT)})" in README.read_text(encoding="utf-8")
    assert draw(tmp_path).read_bytes() == PICTURE.read_bytes()


def test_the_result_files_are_what_was_written() -> None:
    check_seal(RESULTS)


def test_links_and_pictures_are_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8")):
        assert (ROOT / target).exists(), target


def test_a_readme_without_markers_or_with_a_command_that_fails_is_refused() -> None:
    with pytest.raises(BadInput, match="README has no <!-- tiers: begin -->"):
        rewrite("only text")
    readme = README.read_text(encoding="utf-8").replace("--pp 2", "--pp 0")
    with pytest.raises(BadInput, match=r"mlm-train schedule --pp 0 .* failed"):
        rewrite(readme)
