"""README is short, shows what commands and result files say, and nothing in it is typed."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from docs.hooks import generated
from docs.hooks.generated import pages
from docs.hooks.lamb import PAIRS
from docs.hooks.readme import CONSOLE, FIGURES, RESULTS, draw, every_verdict, results_block, rewrite
from mlm_repro.experiments.forecast.ablation import derive_effects
from mlm_repro.lineage.digest import check_seal
from mlm_repro.lineage.errors import BadInput
from mlm_repro.reports.claims import forecast_of_order
from mlm_repro.reports.load import load_reproduction
from tests.architecture.rooms import ROOMS
from tests.conftest import LONG

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
MOST_WORDS = 600


def test_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").split()) <= MOST_WORDS


def test_every_block_is_what_its_command_writes() -> None:
    readme = README.read_text(encoding="utf-8")
    assert [bool(output) for _, output in CONSOLE.findall(readme)] == [True] * 4
    assert rewrite(readme) == readme


def test_a_changed_number_is_noticed() -> None:
    readme = README.read_text(encoding="utf-8")
    first = re.findall(r"355m twin \(49.6 k\) \d+", results_block(load_reproduction(RESULTS)))[0]
    for number in (first, "softmax_offset counts 2", "42.37", "within 1e-10"):
        changed = readme.replace(number, number[:-1] + str((int(number[-1]) + 7) % 10), 1)
        assert changed != readme
        assert rewrite(changed) == readme


def test_the_pictures_are_what_their_command_draws(tmp_path: Path) -> None:
    drawn = draw(tmp_path)
    assert {drawn.name: drawn.read_bytes()} == {
        path.name: path.read_bytes() for path in FIGURES.iterdir()
    }
    shown = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README.read_text(encoding="utf-8"))
    assert [ROOT / place for place in shown] == [FIGURES / "twins.svg"]
    picture = (FIGURES / "twins.svg").read_text(encoding="utf-8")
    assert all(label in picture for label in load_reproduction(RESULTS).summary.labels.values())


def test_every_mark_of_a_generated_part_has_its_partner() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        begun = re.findall("^<!-- generated: (.+) -->$", text, re.MULTILINE)
        assert begun == re.findall("^<!-- end of (.+) -->$", text, re.MULTILINE), page.name


def test_generated_parts_are_current() -> None:
    for page in pages():
        assert generated.rewrite(page.read_text(encoding="utf-8")) == page.read_text(
            encoding="utf-8"
        ), f"{page.name}: run `python -m docs.hooks.generated`"
    assert len(pages()) >= 5


def test_what_the_page_on_lamb_says_of_its_table_is_so() -> None:
    """Both answers are no; a factor on the gradients shows in no mean, a warm-up without correction
    in no end."""
    (run,) = (ROOT / "results" / "ablations").glob(
        "experiment-transformer-xl-trust-ratio-effects-*"
    )
    findings, _ = derive_effects(run)
    assert [finding.outcome for finding in findings] == ["contradicted", "contradicted"]
    page = (ROOT / "docs" / "lamb.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (.+? − .+?) \| (.+) \|$", page, re.MULTILINE))
    assert len(rows) == len(PAIRS)
    for name, cells in rows.items():
        early, end = (
            list(map(float, re.findall(r"[-+][\d.]+", cell))) for cell in cells.split(" | ")
        )
        if "1024" in name:
            assert max(abs(early[0]), abs(end[0])) < 0.01
        elif name.startswith("none"):
            assert end[1] < 0 < end[2]
            assert early[2] < 0


def test_what_was_forecast_is_told_apart_from_what_was_not() -> None:
    """Each step of the order has the verdict of the sealed forecast, whatever that is."""
    (small, large) = (
        each
        for each in every_verdict()
        if each.experiment == "2019/size" and each.scale == "reduced"
    )
    for outcomes in (("confirmed", "undecided"), ("contradicted", "confirmed")):
        steps = [
            replace(each, outcome=outcome)
            for each, outcome in zip((small, large), outcomes, strict=True)
        ]
        said = forecast_of_order([*every_verdict()[:5], *steps])
        assert said.startswith(
            "In other runs, whose forecast was sealed before they were trained, "
        )
        assert [f"is {outcome}" in said for outcome in outcomes] == [True, True]
        assert said.index(small.claim.id.rpartition("/")[2]) < said.index(
            large.claim.id.rpartition("/")[2]
        )
    assert forecast_of_order(every_verdict()[:5]) == ""


def test_the_result_files_are_what_was_written() -> None:
    check_seal(RESULTS)


def test_links_and_pictures_are_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8")):
        assert (ROOT / target).exists(), target


def test_a_readme_without_markers_or_with_a_command_that_fails_is_refused() -> None:
    with pytest.raises(BadInput, match="README does not have both marks, <!--tiers-->"):
        rewrite("only text")
    readme = README.read_text(encoding="utf-8").replace("-m 1 hfu", "-m 1 no-such-row")
    with pytest.raises(BadInput, match=r"compare 2022/table-5 .* no-such-row .* failed"):
        rewrite(readme)


def test_make_test_has_a_part_of_every_room() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(LONG) <= files
    rooms = {Path(name).parts[1] for name in files - set(LONG)}
    assert {*ROOMS, "docs", "architecture", "benchmarks", "golden"} <= rooms
    assert "tests/experiments/test_reproduce.py" not in LONG  # the smallest main job
