"""Each worked example of the documentation is followed to the letter on a copy of the package."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import unescape
from pathlib import Path

import pytest

from tests.architecture.rooms import PACKAGE, ROOMS, ROOT
from tests.commands import call
from tests.evaluation.standins import write_run
from tests.reports.browser import BROWSER, browse

BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
UNFINISHED = shutil.ignore_patterns("*.pyc.*", "*.tmp.*")
"""What another process is writing at the moment."""
EXAMPLES = sorted(page for page in (ROOT / "docs" / "extend").glob("*.md") if page.stem != "index")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. With a title it is a file, or a change of one."""

    language: str
    title: str
    text: str


def blocks(page: str) -> Iterator[Block]:
    """The page's blocks in order."""
    yield from (Block(*(part or "" for part in found.groups())) for found in BLOCK.finditer(page))


def change(before: str, diff: str) -> str:
    """The text with the lines of each hunk replaced; what stands in the hunk must stand once in the
    text."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert before.count(old) == 1, (
            f"the documentation changes lines that are no longer there:\n{old}"
        )
        before = before.replace(old, new)
    return before


def follow(page: str, folder: Path, changes: bool = True) -> list[str]:
    """Do what the page says in `folder`, a copy of the package; the output of each block of
    commands.

    Where it `changes` nothing of the package, commands are forked from a process that has imported
    it.
    """
    environment, outputs = variables(folder), list[str]()
    for block in blocks(page):
        path = folder / block.title
        if block.language == "diff":
            path.write_text(change(path.read_text(encoding="utf-8"), block.text), encoding="utf-8")
        elif block.title:
            path.parent.mkdir(parents=True, exist_ok=True)
            assert not path.exists()
            path.write_text(block.text, encoding="utf-8")
        elif block.language == "sh":
            outputs.append("")
            for line in block.text.splitlines():
                if not changes and line.startswith("mlm-"):
                    outputs[-1] += call(environment, *shlex.split(line), folder=folder, ends=0).out
                    continue
                done = subprocess.run(
                    shlex.split(line),
                    cwd=folder,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=300,
                )
                assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
                outputs[-1] += done.stdout
        else:
            for line in block.text.splitlines():
                assert words(line) in words(outputs[-1]), f"{line!r} is not in\n{outputs[-1]}"
    return outputs


def variables(folder: Path) -> dict[str, str]:
    """Environment of commands of the package in `folder`."""
    return {name: value for name, value in os.environ.items() if name != "MLM_DATA_DIR"} | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(folder / "sources"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }


def words(text: str) -> str:
    """The text with single spaces."""
    return " ".join(text.split())


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The rooms of the package, to be changed; `sources` is on the path of what is started."""
    for room in ROOMS:
        shutil.copytree(ROOT / room, tmp_path / room, ignore=UNFINISHED)
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / PACKAGE).symlink_to(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.stem)
def test_an_example_does_what_it_shows(page: Path, copy: Path) -> None:
    if page.stem == "protocol":
        made = write_run(copy / "made")
        (copy / "runs").mkdir()
        (copy / "runs" / "8.3b-twin").symlink_to(made)
    text = page.read_text(encoding="utf-8")
    assert follow(text, copy)
    assert {block.language for block in blocks(text) if block.title}


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.stem)
def test_the_code_of_an_example_passes_the_linter(page: Path, tmp_path: Path) -> None:
    """So that whoever follows a page has nothing to mend before `make lint` passes."""
    code = [
        block
        for block in blocks(page.read_text(encoding="utf-8"))
        if block.title.endswith(".py") and block.language in ("diff", "python")
    ]
    assert code or page.stem == "experiment"
    for block in code:
        path = tmp_path / block.title
        path.parent.mkdir(parents=True, exist_ok=True)
        # A page may change a file more than once.
        before = path if path.exists() else ROOT / block.title
        changed = block.language == "diff"
        path.write_text(
            change(before.read_text(encoding="utf-8"), block.text) if changed else block.text,
            encoding="utf-8",
        )
    ruff = [sys.executable, "-m", "ruff"]
    settings = ["--config", str(ROOT / "pyproject.toml"), "."]
    for command in (["check", "--no-cache"], ["format", "--no-cache", "--diff"]):
        done = subprocess.run(
            [*ruff, *command, *settings], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_new_stage_changes_no_recipe_and_passes_the_tests_of_stages(copy: Path) -> None:
    before = dry_runs(copy)
    page = (ROOT / "docs" / "extend" / "stage.md").read_text(encoding="utf-8")
    (new,) = (block for block in blocks(page) if block.title.startswith("data_pipeline/stages/"))
    (copy / new.title).write_text(new.text, encoding="utf-8")
    assert dry_runs(copy) == before
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "-vv",
        "-p",
        "no:cacheprovider",
        "tests/data_pipeline/test_stages.py",
    ]
    done = subprocess.run(
        tests, cwd=ROOT, env=variables(copy), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout
    assert "test_a_filter_of_texts_does_what_its_examples_say[letters] PASSED" in done.stdout


def dry_runs(copy: Path) -> list[str]:
    """Recipe and digest that a dry run of each shipped recipe prints."""
    recipes = sorted((copy / "data_pipeline" / "recipes").glob("*.toml"))
    commands = (["mlm-data", "run", str(recipe), "--dry-run"] for recipe in recipes)
    done = [
        subprocess.run(each, cwd=copy, env=variables(copy), capture_output=True, timeout=300)
        for each in commands
    ]
    assert len({each.stdout.split()[-1] for each in done}) == len(recipes) > 4
    return [each.stdout.decode() for each in done]


def test_a_corpus_of_ones_own_trains(tmp_path: Path) -> None:
    *_, traced = follow(
        (ROOT / "docs" / "corpus.md").read_text(encoding="utf-8"), tmp_path, changes=False
    )
    assert "(https://beispiel.de/" in traced


def test_own_text_becomes_a_sentence(tmp_path: Path) -> None:
    *_, sentence, place = follow(
        (ROOT / "docs" / "walk.md").read_text(encoding="utf-8"), tmp_path, changes=False
    )
    assert sentence.startswith("The statement")
    page = tmp_path / place.strip()
    assert json.loads((tmp_path / "runs" / "sentence.json").read_bytes())[
        "continuation"
    ] in unescape(page.read_text())
    if BROWSER:
        opened = browse(page, tmp_path / "profile", "--dump-dom")
        assert "CONSOLE" not in opened.stderr
        assert "After 20 of 20 iterations the training loss is" in opened.stdout


def test_there_is_an_example_of_each_kind() -> None:
    assert [page.stem for page in EXAMPLES] == [
        "experiment",
        "kernel",
        "measurement",
        "model",
        "optimizer",
        "protocol",
        "stage",
    ]


def test_an_example_that_no_longer_fits_is_named() -> None:
    with pytest.raises(AssertionError, match="no longer there"):
        change("a = 1\n", " a = 2\n+b = 3\n")
    assert (
        change("a = 1\nc = 3\n", " a = 1\n+b = 2\n@@\n-c = 3\n+c = 4\n") == "a = 1\nb = 2\nc = 4\n"
    )
