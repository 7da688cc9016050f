"""The documentation builds strictly, loads nothing from elsewhere and leaves out no verb, protocol
or exit code."""

import os
import re
import shutil
import subprocess
import sys
from html import unescape
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from mlm_repro.evaluation.tasks.names import TASKS
from tests.architecture.rooms import ROOT, command_names
from tests.reports.browser import BROWSER, browse


def build(root: Path, out: Path) -> "subprocess.CompletedProcess[str]":
    """`mkdocs build --strict` in `root`."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    assert done.returncode == 0, done.stderr
    return out


def sections(page: Path) -> dict[str, str]:
    """The text below each second-level heading, by its anchor."""
    parts = re.split(r'<h2 id="([^"]+)"', page.read_text(encoding="utf-8"))
    texts = (unescape(re.sub(r"<[^>]+>", "", part)) for part in parts[2::2])
    return dict(zip(parts[1::2], texts, strict=True))


def test_every_page_is_built_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert {page.stem for page in pages} >= {
        "index",
        "architecture",
        "security",
        "contributing",
        "kernel",
    }
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.findall(
            r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(?:https?:)?//[^"]*"', text
        ), page


def verbs_of(name: str) -> dict[str, Any]:
    """The verbs of a command as click sees them."""
    module = import_module(command_names()[name].partition(":")[0])
    return get_command(module.app).commands  # type: ignore[attr-defined,no-any-return]


def options_of(verb: Any) -> set[str]:
    """The options of a verb, `--help` among them."""
    return {
        name
        for parameter in verb.params
        if parameter.param_type_name == "option"
        for name in parameter.opts
    }


@pytest.mark.parametrize("name", command_names())
def test_every_verb_has_a_section_with_its_options(site: Path, name: str) -> None:
    verbs = verbs_of(name)
    found = sections(site / "commands" / f"{name}.html")
    assert list(found) == [f"{name}-{verb}" for verb in verbs]
    for verb, command in verbs.items():
        text = found[f"{name}-{verb}"]
        assert f"Usage: {name} {verb}" in text
        assert options_of(command) <= set(re.findall(r"--?[a-z][a-z-]*", text))


def test_a_page_names_only_commands_that_exist() -> None:
    targets = re.findall(
        r"^([a-z0-9. -]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    count = 0
    for page in (ROOT / "docs").rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        cells = re.findall("`((?:mlm-|make )[^`]+)`", text) if page.name == "seeds.md" else []
        for block in (*blocks, *cells):
            for program, *arguments in map(str.split, block.splitlines()):
                if program == "make":
                    assert arguments[0] in " ".join(targets).split(), page
                elif program in command_names():
                    verbs = verbs_of(program)
                    verb = verbs[arguments[0] if arguments[0] in verbs else "run"]
                    # Else they are another program's.
                    if not verb.context_settings.get("ignore_unknown_options"):
                        assert {word for word in arguments if word.startswith("--")} <= options_of(
                            verb
                        ), page
                    count += 1
    assert count > 10


def windows(text: str) -> list[dict[str, list[str]]]:
    """The rows of a diagram's windows, by their heads."""
    blocks = re.split(r"^(?:window|example) \d+$", text, flags=re.MULTILINE)[1:]
    return [
        {row[0]: row[1:] for line in block.splitlines() if (row := line.split())}
        for block in blocks
    ]


def test_every_protocol_has_a_diagram(site: Path) -> None:
    found = sections(site / "protocols.html")
    assert set(TASKS) <= set(found)
    for name in TASKS:
        for window in windows(found[name]):
            assert len(window["INPUT"]) == len(window["PRED"]) > 0, name
            assert window["PRED"][-1] != "·", name


def test_a_diagram_shows_what_is_context_and_what_is_scored(site: Path) -> None:
    found = sections(site / "protocols.html")
    disjoint = windows(found["wikitext103-stride1024"])
    read = [token for window in disjoint for token in window["INPUT"]]
    scored = [token for window in disjoint for token in window["PRED"]]
    assert read[1:] == scored[:-1]
    assert "·" not in scored
    first, *later = windows(found["wikitext103"])
    assert "·" not in first["PRED"]
    assert all(window["PRED"].count("·") == len(window["PRED"]) - 1 for window in later)
    assert "MEMORY" in windows(found["wikitext103-memory"])[1]
    assert windows(found["wikitext103-lm-eval"])[0]["INPUT"][0] == "<eot>"
    assert [each["PRED"].count("·") for each in windows(found["lambada-last-token"])] == [7]


def test_every_exit_code_is_on_the_page(site: Path) -> None:
    table = re.findall(r"<td>(\d+)</td>", (site / "exit-codes.html").read_text(encoding="utf-8"))
    assert list(dict.fromkeys(table)) == ["0", "2", "3", "4", "5", "6", "7", "70"]


def test_the_menu_is_short_and_begins_with_what_was_found(site: Path) -> None:
    menu = re.search(
        r"^nav:\n(.*?)\n\n",
        (ROOT / "mkdocs.yml").read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    assert menu
    pages = re.findall(r"\S+\.md", menu[1])
    assert len(pages) <= 15
    assert pages.index("results.md") == 1
    assert pages.index("errata.md") < pages.index("walk.md")


def test_the_first_line_of_a_page_says_for_whom_it_is(site: Path) -> None:
    """Holds for every page but those of results, which are for everyone."""
    for page in {path.relative_to(site) for path in site.rglob("*.html")} - {Path("404.html")}:
        if page.stem not in ("results", "errata"):
            text = (site / page).read_text(encoding="utf-8")
            assert re.search(r"</h1>\s*<p>(<em>)?For (who|whoever) ", text), page


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_search_finds_words_in_a_site_that_is_opened_from_the_disk(
    site: Path, tmp_path: Path
) -> None:
    page = f"{(site / 'index.html').as_uri()}?q=microbatches"
    done = browse(page, tmp_path / "profile", "--virtual-time-budget=10000", "--dump-dom")
    assert re.search(r"\d+ matching documents", done.stdout)
    assert "CONSOLE" not in done.stderr


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    for name in ("pyproject.toml", "results", "SECURITY.md", "CONTRIBUTING.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    for page, fault in (
        ("index", "[a](nowhere.md)"),
        ("protocols", "[b](formats.md#no-such-heading)"),
    ):
        with (tmp_path / "docs" / f"{page}.md").open("a", encoding="utf-8") as file:
            file.write(f"\n{fault}\n")
    (tmp_path / "docs" / "alone.md").write_text("# No page of the menu\n", encoding="utf-8")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    for fault in ("nowhere.md", "no-such-heading", "alone.md"):
        assert fault in done.stderr
    assert "3 warnings" in done.stdout
